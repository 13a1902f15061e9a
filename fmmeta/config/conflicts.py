"""Defaults of settings that were left open, and settings that exclude each other, with the reasons.

A conflict is a pair (whether it is there, its line). Reads a Config's values and nothing else, neither files
nor other processes; `settings.py` calls it and raises. Conflicts of one algorithm are in its spec
(AlgorithmSpec.conflicts), those of one setting in its rule (fields.py: excludes, needs, of, per_algorithm).
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fmmeta.common.text import PromptTemplate
from fmmeta.config.algorithms import (
    INNER_OPTIMIZERS,
    KINDS,
    OUTER_OPTIMIZERS,
    check_outer,
    find,
    find_inner,
    find_outer,
    supporting,
)
from fmmeta.config.fields import LARGEST, default_of, rules, shown
from fmmeta.config.learners import check_loss

DEFAULT_LENGTH = 128  # max_length of a run that leaves it open
POLYNOMIAL_END = 1e-7  # the rate at which transformers' polynomial schedule ends

# Settings of a run beside the flags and the data's fingerprint (build.RunInputs.resolved).
RESOLVED = (
    "precision",
    "deepspeed_values",
    "deepspeed_layout",
    "transforms_fingerprint",
    "class_weights_fingerprint",
    "task_type_fingerprint",
)


def resolved(c: Any) -> dict[str, Any]:
    """Values for the settings that were left open."""
    builtin = c.model_name_or_path == "tiny"
    adamw = 2e-3 if builtin else 2e-4 if c.lora_r and not c.outer_parameters else 2e-5
    open_settings = {
        "outer_lr": {"sgd": 1.0, "nesterov": 0.7}.get(c.outer_optimizer, adamw),
        "adam_epsilon": 1e-3 if builtin else 1e-6,
        "test_episodes": c.eval_episodes,
        "lora_alpha": 2.0 * c.lora_r if c.lora_r else None,
        "head_init": "zero",
        "inner_steps": c.chunks if c.learner.ordered else 5,
        "max_length": c.context + c.chunk if c.learner.ordered else DEFAULT_LENGTH,
        "inner_lr": inner_rate(c),
        "inner_lr_learned": "no",
        "n_way": 3 if "digits" in c.dataset else 5,
        **c.learner.defaults,
        **find(c.algorithm).defaults,
    }
    return {name: value for name, value in open_settings.items() if getattr(c, name) is None}


def inner_rate(c: Any) -> float:
    """The default of inner_lr. For language models one with which five steps lower the support loss, of
    SmolLM2-135M and of the built-in model, of adapters and of all weights
    (docs/how-to/evaluate-and-adapt.md).
    """
    if not c.learner.writes:
        return 0.1
    of_adapters = c.lora_r or c.builtin_model
    return {"adamw": 3e-3 if of_adapters else 3e-5}.get(c.inner_optimizer, 0.1 if of_adapters else 1e-3)


def without_effect(c: Any) -> Iterator[str]:
    """Settings that were changed and that no code would read."""
    supports, known = find(c.algorithm).supports, rules(c)
    for item in fields(c):
        name, rule, value = item.name, known[item.name], getattr(c, item.name)
        if value in (default_of(item), None):
            continue
        given = f"{name}={shown(value)}"
        holder = c if rule.of == "draws_classes" else c.learner
        if rule.of and not getattr(holder, rule.of) and name not in c.learner.reads:
            yield f"{given} means nothing for task_type={c.task_type}; leave it out"
        if rule.needs:
            other, *values = rule.needs
            found = getattr(c, other)
            if other == "outer_optimizer" and name in find_outer(found).options.values():
                continue
            if not (found in values if values else found):
                use = f"use --{other} {' or '.join(values)}" if values else f"give --{other}"
                yield f"{given} means nothing for {other}={found}; leave it out, or {use}"
        for name_or_value, why in rule.excludes.items():
            other, _, excluded = name_or_value.partition("=")
            found = getattr(c, other)
            accepted = (default_of(type(c).__dataclass_fields__[other]), None)
            if str(found) == excluded or not (excluded or found in accepted):
                yield f"{given} with {other}={shown(found)}: {why}; leave one out"
        if rule.per_algorithm and value != "no" and name not in supports:
            yield (
                f"{given} is not supported by algorithm={c.algorithm}; leave it out, or use"
                f" {' or '.join(supporting(name))}"
            )


Conflicts = list[tuple[Any, str]]


def problems(c: Any) -> Iterator[str]:
    """One line for each setting without effect and each conflict."""
    yield from without_effect(c)
    for conflicts in (
        of_stream(c) if c.learner.ordered else [],
        of_run(c),
        of_data(c),
        of_algorithm(c),
        [(True, text) for text in find(c.algorithm).conflicts(c)],
        of_inner_loop(c),
        of_outer_step(c),
        [] if c.learner.plain else of_own_rows(c),
        of_several_tasks(c) if c.tasks_per_pass != "1" else [],
    ):
        yield from (text for is_there, text in conflicts if is_there)


def of_training(c: Any) -> Conflicts:
    """Settings without effect on training alone: `evaluate` and `adapt` set them where a model has no head.
    What a user's kind of task reads is not known.
    """
    known = c.learner.has_head or ":" in c.task_type
    unread = [name for name, is_read in {"n_way": c.draws_classes, "head_init": False}.items() if not is_read]
    return [
        (
            getattr(c, name) != getattr(replace(c, **{name: None}), name),
            f"{name}={getattr(c, name)} means nothing for task_type={c.task_type}; leave it out",
        )
        for name in ([] if known else unread)
    ]


def of_run(c: Any) -> Conflicts:
    known = {*type(c).__dataclass_fields__, "dataset_fingerprint", *RESOLVED}
    schedule, own = c.task_schedule, ":" in c.task_schedule
    return [
        (
            schedule not in ("static", "dynamic") and not own,
            f"task_schedule={schedule} is unknown; use static, dynamic, or module:class of yours",
        ),
        (
            own and (c.elastic or c.max_staleness),
            f"task_schedule={schedule} with elastic={c.elastic} and max_staleness={c.max_staleness}, which"
            " are schedules too; leave the others out",
        ),
        (
            c.elastic and c.output_dir is None,
            "elastic=True needs output_dir: every group must find the same folder; give one on a disk that"
            " all of them see",
        ),
        (
            c.pipeline_balance == "time" and c.pipeline_stages == 1,
            "pipeline_balance=time means nothing for pipeline_stages=1; leave it out",
        ),
        *(
            (
                name not in known,
                f"accept_changed_settings={name} is no setting; name those that the refusal names",
            )
            for name in c.accept_changed_settings
        ),
        (not c.report_to, "report_to= names no tracker; name each once, or none"),
        (
            len(set(c.report_to)) < len(c.report_to),
            f"report_to={shown(c.report_to)} names a tracker twice; name each once, or none",
        ),
        *(
            (
                one in c.report_to and len(c.report_to) > 1,
                f"report_to={shown(c.report_to)} names {one} and others; leave out {one}",
            )
            for one in ("none", "all")
        ),
        (
            c.run_name is not None and not is_file_name(c.run_name),
            f"run_name={c.run_name} is no name of a folder; use letters, digits, - and _",
        ),
    ]


def is_file_name(name: str) -> bool:
    return name == Path(name).name and name not in ("", "..") and name.isprintable()


def of_data(c: Any) -> Conflicts:
    names, weights = shown(c.dataset), c.mix_weights
    fits = len(weights) == len(c.dataset) and all(0 < weight < math.inf for weight in weights)
    return [
        (not c.dataset, "dataset= names no data set; name each once"),
        (c.draws_classes and c.n_way < 2, f"n_way={c.n_way} is below 2; use 2 or more"),
        (len(set(c.dataset)) < len(c.dataset), f"dataset={names} names a data set twice; name each once"),
        *(
            (
                getattr(c, name) is not None and len(c.dataset) > 1,
                f"{name}={getattr(c, name)} cannot serve {len(c.dataset)} data sets; put a {name}.json into"
                " the folder of each",
            )
            for name in ("class_splits", "task_splits")
        ),
        *(
            (
                getattr(c, name) is not None and len(c.dataset) > 1,
                f"{name}={getattr(c, name)} with {len(c.dataset)} data sets, each of which is a stratum;"
                " leave it out, or give one data set",
            )
            for name in ("stratify_by", "stratum_column")
        ),
        (
            "digits" in c.dataset and {"letters", "words"} & {*c.dataset},
            f"dataset={names} mixes images and texts, and a model reads one kind; train two runs",
        ),
        (
            weights and not fits,
            f"mix_weights={shown(weights)} does not fit dataset={names}; give one positive number for each",
        ),
        *(
            (
                getattr(c, f"{name}_max") is not None and getattr(c, f"{name}_max") < getattr(c, name),
                f"{name}_max={getattr(c, f'{name}_max')} is below {name}={getattr(c, name)}; raise it or"
                " leave it out",
            )
            for name in ("n_way", "k_shot")
        ),
        (
            c.prompt_template != "chat" and not is_prompt(c.prompt_template),
            f"prompt_template={c.prompt_template} is neither plain nor chat, and no format string with"
            " {input} before an only {output}, the last name; write one such as"
            " 'Q: {input}\\nA: {output}', names of other columns in single braces, and {{ and }} for braces",
        ),
    ]


def is_prompt(template: str) -> bool:
    with suppress(ValueError):
        return bool(PromptTemplate.of(template))
    return False


def of_algorithm(c: Any) -> Conflicts:
    name, spec = c.algorithm, find(c.algorithm)
    head = spec.defaults.get("head_init", c.head_init)
    keeps = "trajectory_memory_gib" in spec.supports or c.multi_step_loss_steps or c.inner_lr_learned != "no"
    return [
        (
            c.trajectory_memory_gib is not None and not keeps,
            f"trajectory_memory_gib={c.trajectory_memory_gib} means nothing for algorithm={name}, which"
            " keeps no trajectory; leave it out",
        ),
        (
            c.head_init != head,
            f"head_init={c.head_init} contradicts algorithm={name}, whose head is {head}; leave --head_init"
            " out",
        ),
        (
            bool(spec.needs) and not getattr(c.learner, spec.needs),
            f"task_type={c.task_type} does not go with algorithm={name}, which is for"
            f" {KINDS.get(spec.needs)}; use another algorithm",
        ),
        (
            c.inner_steps == 0 and not spec.trains_nothing and spec.defaults.get("inner_steps") != 0,
            f"inner_steps=0 leaves algorithm={name} nothing to learn through; use 1 or more",
        ),
        (
            c.prototype_gradient
            and not (c.head_init == "prototype" and "prototype_gradient" in spec.supports),
            f"prototype_gradient=True means nothing for algorithm={name} and head_init={c.head_init}; use it"
            " with head_init=prototype and an algorithm that differentiates through the inner loop",
        ),
        *(
            (
                spec.trains_nothing and getattr(c, setting) != unset,
                f"{setting}={getattr(c, setting)} means nothing for algorithm={name}, which trains nothing;"
                " leave it out",
            )
            for setting, unset in {
                "max_staleness": 0,
                "reduce_dtype": "fp32",
                "elastic": False,
                "task_schedule": "static",
                "gradient_noise_scale": False,
            }.items()
        ),
    ]


def of_inner_loop(c: Any) -> Conflicts:
    name, inner, spec = c.algorithm, c.inner_optimizer, find(c.algorithm)
    own, attention = inner not in INNER_OPTIMIZERS, c.attn_implementation or ""
    has_derivative = not own or find_inner(inner).differentiable is not None
    second_order = spec.order > 1 and c.first_order_steps < c.outer_steps
    return [
        (
            c.support_batch_size and (spec.order > 1 or spec.frozen_body or spec.evaluation),
            f"support_batch_size={c.support_batch_size} with algorithm={name}: inner steps on samples of the"
            " support set are implemented for first-order rules that change all weights; use fomaml or"
            " reptile, or leave it out",
        ),
        (
            c.check_meta_gradient and inner not in ("sgd", "momentum"),
            f"check_meta_gradient=True with inner_optimizer={inner}: differences do not give the derivative"
            " of its state, so that there is nothing to compare with; check with sgd",
        ),
        (
            second_order and not has_derivative,
            f"inner_optimizer={inner} with algorithm={name}: the exact meta-gradient needs the derivative of"
            " its direction, and it has no differentiable=; use sgd or momentum, or algorithm=fomaml or"
            " reptile",
        ),
        (
            second_order
            and not spec.frozen_body
            and inner not in ("sgd", "momentum")
            and (c.second_order == "differences" or not (c.lora_r or c.second_order == "autograd")),
            f"inner_optimizer={inner} with algorithm={name} and second_order={c.second_order}: the"
            " derivative of its state needs autograd; give --lora_r or --second_order autograd, or use sgd or"
            " momentum",
        ),
        (
            c.second_order == "autograd" and attention not in ("", "sdpa", "eager"),
            f"second_order=autograd with attn_implementation={attention}, which has no second derivative; use"
            " sdpa or eager",
        ),
        *(
            (
                not 0 <= factor_of(item) * c.inner_lr < LARGEST,
                f"inner_lr_groups={item} is no PATTERN=FACTOR with a factor of 0 or more; write, say, head=10"
                " or '*embeddings*=0'",
            )
            for item in c.inner_lr_groups
        ),
        (
            c.inner_lr_groups and spec.adapts != "all",
            f"inner_lr_groups={shown(c.inner_lr_groups)} contradicts algorithm={name}, which is a choice of"
            " layers; leave it out",
        ),
    ]


OF_OWN_ROWS = {  # what does not go with a learner that reads rows
    "pipeline_stages": "stages are made of models for texts and answers",
}
OF_OWN_INPUTS = {  # what does not go with other inputs of a classifier
    "tensor_parallel_size": "tensor ranks are not tested with other inputs",
    "tasks_per_pass": "inputs of several tasks are not joined",
    "example_transforms": "the learner reads the rows and can change them itself",
    "episode_transforms": "the learner reads the rows and can change them itself",
    "label_names": "the text of a class is no row of the data",
}
OF_MODULE = {  # what does not go with a module that is no model of transformers
    "tensor_parallel_size": "no plan says how to split it",
    "lora_r": "adapters are for models of transformers",
    "gradient_checkpointing": "it does that itself",
    "compile": "it does that itself, with torch.compile",
    "attn_implementation": "it is no model of transformers",
    "model_revision": "it is no model of the hub",
}


def excluded_by_kind(c: Any, excluded: Mapping[str, str]) -> Conflicts:
    """excluded: by setting, why the kind of task does not go with it."""
    changed = [item.name for item in fields(c) if getattr(c, item.name) not in (default_of(item), None)]
    return [
        (
            name in changed,
            f"{name}={shown(getattr(c, name))} with task_type={c.task_type}: {why}; leave it out",
        )
        for name, why in excluded.items()
    ]


def of_own_rows(c: Any) -> Conflicts:
    excluded = OF_OWN_ROWS | (OF_OWN_INPUTS if c.learner.of_classes else {})
    excluded |= OF_MODULE if c.learner.make else {}
    return [
        (
            c.head_init == "prototype" and not c.learner.of_classes,
            f"head_init=prototype is made of means of classes, and task_type={c.task_type} has none; use zero"
            " or learned",
        ),
        *excluded_by_kind(c, excluded),
    ]


OF_STREAM = {  # what does not go with documents that are read chunk by chunk
    "k_shot": "a row is a chunk of a document",
    "num_query": "each chunk is scored before its step",
    "support_batch_size": "each step learns from one chunk",
    "example_transforms": "rows are cut out of a document's tokens",
}


def of_stream(c: Any) -> Conflicts:
    spec = find(c.algorithm)
    return [
        *excluded_by_kind(c, OF_STREAM),
        (
            c.max_staleness and spec.order > 1,
            f"max_staleness={c.max_staleness} with algorithm={c.algorithm} is implemented for first-order"
            " rules, of which reptile learns streams; use --algorithm reptile, or leave it out",
        ),
        (
            c.max_length != c.context + c.chunk,
            f"max_length={c.max_length}: a row has context={c.context} and chunk={c.chunk} tokens; leave it"
            " out",
        ),
        (
            spec.needs != "ordered" and (spec.order > 1 or spec.multi_task == "query"),
            f"algorithm={c.algorithm} with task_type={c.task_type}, whose chunks are scored before their"
            " steps and not by a query set; use ttt, reptile, joint or none",
        ),
        (
            c.inner_steps != c.chunks,
            f"inner_steps={c.inner_steps} with chunks={c.chunks}: a step learns from one chunk; leave"
            " inner_steps out",
        ),
    ]


def factor_of(item: str) -> float:
    """The factor of PATTERN=FACTOR; not a number for other texts."""
    pattern, _, factor = item.rpartition("=")
    try:
        return float(factor) if pattern else math.nan
    except ValueError:
        return math.nan


def of_outer_step(c: Any) -> Conflicts:
    if c.outer_optimizer not in OUTER_OPTIMIZERS:
        check_outer(c)
    check_loss(c.task_type)
    return [
        (
            c.warmup_steps >= 1 and c.warmup_steps % 1,
            f"warmup_steps={c.warmup_steps} is neither a share of outer_steps below 1 nor a whole number; use"
            " 0.1 or 10, say",
        ),
        (
            c.warmup_steps and c.lr_scheduler_type == "constant",
            f"warmup_steps={c.warmup_steps} means nothing for lr_scheduler_type=constant; leave it out, or"
            " use constant_with_warmup",
        ),
        (
            c.lr_scheduler_type == "polynomial" and c.outer_lr <= POLYNOMIAL_END,
            f"outer_lr={c.outer_lr} with lr_scheduler_type=polynomial, which ends at {POLYNOMIAL_END:g}; use"
            " a higher rate, or linear",
        ),
        (
            c.gradient_noise_scale and c.tasks_per_step == 1,
            "gradient_noise_scale=True compares the tasks of an outer step, and there is one"
            " (meta_batch_size=1); use --meta_batch_size 2 or more",
        ),
        (
            c.max_staleness and find(c.algorithm).order > 1,
            f"max_staleness={c.max_staleness} with algorithm={c.algorithm} is implemented for first-order"
            " rules; use fomaml or reptile, or leave it out",
        ),
    ]


def of_several_tasks(c: Any) -> Conflicts:
    """One pass for several tasks."""
    spec = find(c.algorithm)
    if spec.frozen_body:
        excluded: Conflicts = [
            (
                c.gradient_noise_scale,
                "gradient_noise_scale=True, which needs the gradient of each task alone",
            ),
        ]
    else:
        excluded = [
            (
                not (c.lora_r or c.learner.make),
                f"lora_r=0, where tasks of {c.algorithm} need a whole model each",
            ),
            (spec.multi_task is None, f"algorithm={c.algorithm}, which has no rule for several tasks"),
            (spec.order > 1 and c.second_order == "differences", "second_order=differences"),
            (c.check_meta_gradient, "check_meta_gradient=True"),
            (
                not c.learner.kind.rows_are_independent,
                f"task_type={c.task_type}, whose losses of rows depend on each other",
            ),
            (c.pipeline_stages > 1, f"pipeline_stages={c.pipeline_stages}"),
            (c.tensor_parallel_size > 1, f"tensor_parallel_size={c.tensor_parallel_size}"),
            (
                c.n_way_max is not None,
                f"n_way_max={c.n_way_max}, where tasks have heads of different sizes",
            ),
            (c.packing, "packing=True"),
            (c.inner_lr_learned != "no", f"inner_lr_learned={c.inner_lr_learned}"),
            (c.inner_lr_groups, f"inner_lr_groups={shown(c.inner_lr_groups)}"),
            (c.inner_parameters, f"inner_parameters={shown(c.inner_parameters)}"),
            (c.outer_parameters, f"outer_parameters={shown(c.outer_parameters)}"),
            (c.multi_step_loss_steps, f"multi_step_loss_steps={c.multi_step_loss_steps}"),
            (c.prototype_gradient, "prototype_gradient=True"),
            (c.offload_outer, "offload_outer=True"),
            (c.compile, "compile=True, as tasks replace layers in each pass"),
        ]
    given = f"tasks_per_pass={c.tasks_per_pass} is not implemented with"
    return [
        (is_there, f"{given} {what}; leave it out, or use --tasks_per_pass 1") for is_there, what in excluded
    ]
