"""What values the settings may have: defaults of those left open, and a line for everything that cannot work.

Reads a Config's values and nothing else, neither files nor other processes; `config.py` calls it and raises.
Which algorithm goes with which settings is in conflicts.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import Field
from typing import Any

from fmmeta.config import conflicts
from fmmeta.config.values import LARGEST

MINIMUM = {
    "lora_r": 0,
    "n_way": 2,
    "k_shot": 1,
    "num_query": 1,
    "max_length": 4,
    "meta_batch_size": 1,
    "meta_accumulation_steps": 1,
    "inner_steps": 0,
    "inner_weight_decay": 0,
    "cg_steps": 1,
    "cg_damping": 0,
    "first_order_steps": 0,
    "multi_step_loss_steps": 0,
    "outer_steps": 1,
    "warmup_steps": 0,
    "max_grad_norm": 0,
    "max_bad_steps": 1,
    "seed": 0,
    "outer_delay": 0,
    "micro_batch_size": 1,
    "max_tokens_per_micro_batch": 0,
    "pipeline_stages": 1,
    "tensor_parallel_size": 1,
    "feature_norm": 0,
    "save_steps": 0,
    "save_total_limit": 1,
    "max_failed_saves": 1,
    "check_replicas_steps": 0,
    "eval_steps": 0,
    "eval_episodes": 0,
    "test_episodes": 0,
    "logging_steps": 1,
    "weight_decay": 0,
    "prefetch_factor": 1,
    "prepare_timeout": 1,
}
MOST_SEED = 2**64 - 1
# What the settings of a run have beside the flags and the data's fingerprint (build.Plan.resolved).
RESOLVED = (
    "precision",
    "float32_matmul_precision",
    "deepspeed_values",
    "deepspeed_layout",
    "transforms_fingerprint",
)
POSITIVE = ("inner_lr", "outer_lr", "adam_epsilon", "inner_epsilon", "inner_lr_outer_lr", "proximal_weight")
OPTIONAL_POSITIVE = (
    "max_task_loss",
    "max_task_norm",
    "step_timeout",
    "max_file_gib",
)  # positive, where they are given
BELOW_ONE = ("inner_momentum", "inner_beta1", "inner_beta2", "outer_momentum")


def of_choices(c: Any, settings: Iterable[Field[Any]]) -> Iterator[str]:
    """Values that are none of those to choose from."""
    for item in settings:
        choices, given = item.metadata.get("choices"), getattr(c, item.name)
        for value in given if isinstance(given, list) else [given]:
            if choices and value is not None and value not in choices:
                listed = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
                yield f"{item.name}={value} is unknown; use {listed}"


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
    for name, least in MINIMUM.items():
        if getattr(c, name) < least:
            yield f"{name}={getattr(c, name)} is below {least}; use {least} or more"
        if not getattr(c, name) <= LARGEST:
            yield (
                f"{name}={getattr(c, name)} is no number to compute with; use {least} or more, up to"
                f" {LARGEST:g}"
            )
    if c.seed > MOST_SEED:
        yield f"seed={c.seed} is above {MOST_SEED}, the largest that torch takes; use a smaller one"
    for name in POSITIVE:
        if getattr(c, name) > LARGEST:
            yield f"{name}={getattr(c, name)} is no number to compute with; use one up to {LARGEST:g}"
        if not getattr(c, name) > 0:
            yield f"{name}={getattr(c, name)} is no positive number; use one, such as 0.1 for inner SGD"
    for name in OPTIONAL_POSITIVE:
        value = getattr(c, name)
        if value is not None and not 0 < value < math.inf:
            yield f"{name}={value} is no positive number; use one, or leave it out"
    for name in BELOW_ONE:
        if not 0 <= getattr(c, name) < 1:
            yield f"{name}={getattr(c, name)} is not in [0, 1); use 0.9, say"
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
