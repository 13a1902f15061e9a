"""What values the settings may have: defaults of those left open, and a line for everything that cannot work.

Reads a Config's values and nothing else, neither files nor other processes; `settings.py` calls it and
raises. Which algorithm goes with which settings is in conflicts.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import Field
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.config import conflicts
from fmmeta.config.fields import rules
from fmmeta.config.values import LARGEST

MOST_SEED = 2**64 - 1
# What the settings of a run have beside the flags and the data's fingerprint (build.RunInputs.resolved).
RESOLVED = (
    "precision",
    "float32_matmul_precision",
    "deepspeed_values",
    "deepspeed_layout",
    "transforms_fingerprint",
)


def of_choices(c: Any, settings: Iterable[Field[Any]]) -> Iterator[str]:
    """Values that are none of those to choose from."""
    for item in settings:
        choices, given = item.metadata.get("choices"), getattr(c, item.name)
        for value in given if isinstance(given, list) else [given]:
            if choices and value is not None and value not in choices:
                listed = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
                yield f"{item.name}={value} is unknown; use {listed}"


def out_of_bounds(c: Any) -> Iterator[str]:
    """Numbers that break a rule of their setting. c: any dataclass of settings."""
    for name, rule in rules(c).items():
        value = getattr(c, name)
        if value is None:
            continue
        if rule.below is not None and not 0 <= value < rule.below:
            yield f"{name}={value} is not in [0, {rule.below:g}); use 0.9, say"
        if rule.least is not None and value < rule.least:
            yield f"{name}={value} is below {rule.least}; use {rule.least} or more"
        if rule.least is not None and not value <= LARGEST:
            yield f"{name}={value} is no number to compute with; use {rule.least} or more, up to {LARGEST:g}"
        if rule.positive and value > LARGEST:
            yield f"{name}={value} is no number to compute with; use one up to {LARGEST:g}"
        if rule.positive and not value > 0:
            yield f"{name}={value} is no positive number; use one, {rule.positive}"


def check_bounds(settings: Any) -> None:
    """Raises `UsageError`."""
    for problem in out_of_bounds(settings):
        raise UsageError(problem)


def resolved(c: Any) -> dict[str, Any]:
    """Values for the settings that were left open."""
    builtin = c.model_name_or_path == "tiny"
    adamw = 2e-3 if builtin else 2e-4 if c.lora_r else 2e-5
    open_settings = {
        "outer_lr": {"sgd": 1.0, "nesterov": 0.7}.get(c.outer_optimizer, adamw),
        "adam_epsilon": 1e-3 if builtin else 1e-6,
        "test_episodes": c.eval_episodes,
        "lora_alpha": 2.0 * c.lora_r if c.lora_r else None,
        **conflicts.defaults(c),
    }
    return {name: value for name, value in open_settings.items() if getattr(c, name) is None}


def problems(c: Any) -> Iterator[str]:
    """One line for everything that cannot work, the plainest first."""
    yield from _of_numbers(c)
    yield from _of_the_task_type(c)
    yield from _of_data(c)
    yield from _of_the_prompt(c)
    yield from _of_lora(c)
    yield from _of_trackers(c)
    yield from conflicts.problems(c)


def _of_numbers(c: Any) -> Iterator[str]:
    yield from out_of_bounds(c)
    if c.seed > MOST_SEED:
        yield f"seed={c.seed} is above {MOST_SEED}, the largest that torch takes; use a smaller one"
    if c.group_size != "auto" and not (c.group_size.isdecimal() and int(c.group_size) > 0):
        yield f"group_size={c.group_size} is neither a positive number nor auto; use auto, 1, 2, 4, ..."
    if c.num_workers != "auto" and not c.num_workers.isdecimal():
        yield f"num_workers={c.num_workers} is neither a number nor auto; use auto, 0, 1, 2, ..."
    if c.tasks_per_pass != "auto" and not (c.tasks_per_pass.isdecimal() and int(c.tasks_per_pass) > 0):
        yield f"tasks_per_pass={c.tasks_per_pass} is neither a positive number nor auto; use auto, 1, 8, ..."
    if c.load_best_model_at_end and not (c.eval_steps and c.eval_episodes):
        yield "load_best_model_at_end=True needs validation scores; give --eval_steps and --eval_episodes"
    for name in c.accept_changed_settings:
        if name not in (*type(c).__dataclass_fields__, "dataset_fingerprint", *RESOLVED):
            yield f"accept_changed_settings={name} is no setting; name those that the refusal names"
    if not 0 < c.init_interpolation <= 1:
        yield (
            f"init_interpolation={c.init_interpolation} is not in (0, 1]; use 1 for the trained weights"
            " alone, or less, such as 0.6, to mix the initial weights in"
        )
    if not 0 <= c.max_bad_fraction <= 1:
        yield f"max_bad_fraction={c.max_bad_fraction} is no share; use a number from 0 to 1"


def _of_the_task_type(c: Any) -> Iterator[str]:
    """Settings that belong to the other kind of task."""
    causal = c.task_type == "causal_lm"
    own = ("text_column", "label_column", "pooling", "feature_norm"), ("input_column", "output_column")
    foreign: dict[str, tuple[Any, ...]] = dict.fromkeys(own[0] if causal else own[1], (None, "auto", 0))
    foreign |= (
        {"n_way_max": (None,), "k_shot_max": (None,)}
        if causal
        else {"packing": (False,), "prompt_template": ("plain",)}
    )
    for name, unset in foreign.items():
        if getattr(c, name) not in unset:
            yield f"{name}={getattr(c, name)} means nothing for task_type={c.task_type}; leave it out"


def _of_data(c: Any) -> Iterator[str]:
    names = " ".join(c.dataset)
    if not c.dataset or len(set(c.dataset)) < len(c.dataset):
        yield f"dataset={names} names {'a data set twice' if names else 'no data set'}; name each once"
    for name in ("class_splits", "task_splits"):
        if getattr(c, name) is not None and len(c.dataset) > 1:
            yield (
                f"{name}={getattr(c, name)} cannot serve {len(c.dataset)} data sets; put a {name}.json into"
                " the folder of each"
            )
    if c.mix_weights and (
        len(c.mix_weights) != len(c.dataset) or not all(0 < w < math.inf for w in c.mix_weights)
    ):
        yield (
            f"mix_weights={' '.join(map(str, c.mix_weights))} does not fit dataset={names}; give one positive"
            " number for each"
        )
    if not c.mix_temperature > 0:
        yield (
            f"mix_temperature={c.mix_temperature} is not positive; use 1, or more to draw rare strata more"
            " often"
        )
    if c.mix_weights and c.mix_temperature != 1:
        yield f"mix_temperature={c.mix_temperature} and mix_weights both set the shares; leave one out"
    for name, least in (("n_way_max", c.n_way), ("k_shot_max", c.k_shot)):
        value = getattr(c, name)
        if value is not None and value < least:
            yield f"{name}={value} is below {name.removesuffix('_max')}={least}; raise it or leave it out"


def _of_the_prompt(c: Any) -> Iterator[str]:
    template = c.prompt_template
    if template in ("plain", "chat"):
        return
    before, output, after = template.partition("{output}")
    if "{input}" not in before or (output and ("{input}" in after or "{output}" in after)):
        yield (
            f"prompt_template={template} is neither plain nor chat, and no format string with {{input}}"
            " before an only {output}; write one such as 'Q: {input}\\nA: {output}'"
        )


def _of_lora(c: Any) -> Iterator[str]:
    if c.lora_r and not 0 < c.lora_alpha < math.inf:
        yield f"lora_alpha={c.lora_alpha} is no positive number; use one, such as {2 * c.lora_r}"
    for name in () if c.lora_r else ("lora_alpha", "lora_target_modules", "lora_merge"):
        if value := getattr(c, name):
            shown = " ".join(value) if isinstance(value, list) else value
            yield f"{name}={shown} means nothing for lora_r=0; give --lora_r, or leave it out"


def _of_trackers(c: Any) -> Iterator[str]:
    names = " ".join(c.report_to)
    if not c.report_to or len(set(c.report_to)) < len(c.report_to):
        yield (
            f"report_to={names} names {'a tracker twice' if names else 'no tracker'}; name each once, or none"
        )
    if "none" in c.report_to and len(c.report_to) > 1:
        yield f"report_to={names} names none and others; leave out none"
