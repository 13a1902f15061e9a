"""Defaults of settings that were left open, and the values that a setting may have.

Reads a Config's values and nothing else, neither files nor other processes; `settings.py` calls it and
raises. Settings that exclude each other are in conflicts.py.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.text import any_of
from fmmeta.config import conflicts
from fmmeta.config.algorithms import find, supporting
from fmmeta.config.fields import SettingRule, default_of, rules
from fmmeta.config.values import LARGEST, shown

# Settings of a run beside the flags and the data's fingerprint (build.RunInputs.resolved).
RESOLVED = (
    "precision",
    "float32_matmul_precision",
    "deepspeed_values",
    "deepspeed_layout",
    "transforms_fingerprint",
)


def check_values(c: Any) -> None:
    """Check each setting of a dataclass by its choices and bounds. Raises `UsageError`."""
    for item in fields(c):
        choices, given = item.metadata.get("choices"), getattr(c, item.name)
        for value in given if isinstance(given, list) else [given]:
            if choices and value is not None and value not in choices:
                raise UsageError(f"{item.name}={value} is unknown; use {any_of(choices)}")
    for name, rule in rules(c).items():
        for problem in out_of_bounds(name, getattr(c, name), rule):
            raise UsageError(problem)


def out_of_bounds(name: str, value: Any, rule: SettingRule) -> Iterator[str]:
    """A line for each bound that a value breaks; None is always accepted."""
    if value is None:
        return
    if rule.or_auto is not None:
        if value != "auto" and (not value.isdecimal() or int(value) < rule.or_auto):
            yield f"{name}={value} is neither auto nor a number; use auto, or {rule.or_auto} or more"
        return
    if rule.below is not None and not 0 <= value < rule.below:
        yield f"{name}={value} is not in [0, {rule.below:g}); use 0.9, say"
    if rule.least is not None and value < rule.least:
        yield f"{name}={value} is below {rule.least}; use {rule.least} or more"
    if rule.positive and not value > 0:
        yield f"{name}={value} is no positive number; use one, {rule.positive}"
    if (rule.least is not None or rule.positive) and not value <= rule.most:
        above = "no number to compute with" if rule.most == LARGEST else f"above {rule.most}"
        least = "one" if rule.least is None else f"{rule.least} or more,"
        yield f"{name}={value} is {above}; use {least} up to {rule.most}"


def resolved(c: Any) -> dict[str, Any]:
    """Values for the settings that were left open."""
    builtin = c.model_name_or_path == "tiny"
    adamw = 2e-3 if builtin else 2e-4 if c.lora_r else 2e-5
    open_settings = {
        "outer_lr": {"sgd": 1.0, "nesterov": 0.7}.get(c.outer_optimizer, adamw),
        "adam_epsilon": 1e-3 if builtin else 1e-6,
        "test_episodes": c.eval_episodes,
        "lora_alpha": 2.0 * c.lora_r if c.lora_r else None,
        "head_init": "zero",
        "inner_steps": 5,
        "inner_lr_learned": "no",
        **find(c.algorithm).defaults,
    }
    return {name: value for name, value in open_settings.items() if getattr(c, name) is None}


def problems(c: Any) -> Iterator[str]:
    """One line for each setting without effect and each conflict."""
    yield from without_effect(c)
    yield from conflicts.problems(c)


def without_effect(c: Any) -> Iterator[str]:
    """Settings that were changed and that no code would read."""
    supports, known = find(c.algorithm).supports, rules(c)
    for item in fields(c):
        name, rule, value = item.name, known[item.name], getattr(c, item.name)
        if value in (default_of(item), None):
            continue
        given = f"{name}={shown(value)}"
        if rule.task_type not in ("", c.task_type):
            yield f"{given} means nothing for task_type={c.task_type}; leave it out"
        if rule.needs:
            other, *values = rule.needs
            found = getattr(c, other)
            if not (found in values if values else found):
                use = f"use --{other} {' or '.join(values)}" if values else f"give --{other}"
                yield f"{given} means nothing for {other}={found}; leave it out, or {use}"
        if rule.per_algorithm and value != "no" and name not in supports:
            yield (
                f"{given} is not supported by algorithm={c.algorithm}; leave it out, or use"
                f" {' or '.join(supporting(name))}"
            )
