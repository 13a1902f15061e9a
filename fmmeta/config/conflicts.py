"""Which algorithm goes with which settings: what each takes by default, and what is refused, with the reason.

Reads a Config's values and nothing else; `validate.py` asks it. An empty answer means that every setting has
its effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fmmeta.common.text import any_of
from fmmeta.config.algorithms import find, supporting
from fmmeta.config.outer_optimizers import OUTER_OPTIMIZERS
from fmmeta.config.values import LARGEST

OPTIONAL = {  # settings that only some algorithms go with (AlgorithmSpec.supports), and their unset values
    "proximal_weight": 2.0,
    "cg_steps": 5,
    "cg_damping": 0.0,
    "first_order_steps": 0,
    "multi_step_loss_steps": 0,
    "check_meta_gradient": False,
    "inner_lr_learned": "no",
    "offload_outer": False,
}
NOT_ELEMENTWISE = {
    "muon": "it orthogonalises whole weight matrices",
    "lbfgs": "its line search evaluates the loss",
    "adafactor": "it keeps moments of whole rows and columns",
    "shampoo": "it multiplies whole matrices",
    "soap": "it rotates whole matrices",
    "lamb": "it takes norms of whole parameters",
    "lars": "it takes norms of whole parameters",
    "sparse_adam": "it takes sparse gradients",
}


def defaults(c: Any) -> dict[str, Any]:
    """What the algorithm takes where a setting was left open."""
    return {"head_init": "zero", "inner_steps": 5, "inner_lr_learned": "no", **find(c.algorithm).defaults}


def problems(c: Any) -> Iterator[str]:
    """One line for everything about the algorithm that contradicts something else."""
    yield from _without_effect(c)
    yield from _parallelism_conflicts(c)
    yield from _algorithm_conflicts(c)
    yield from _inner_loop_conflicts(c)
    yield from _outer_optimizer_conflicts(c)
    yield from _delay_conflicts(c)
    yield from _elastic_conflicts(c)
    yield from _multi_task_conflicts(c)
    yield from _compile_conflicts(c)


def _without_effect(c: Any) -> Iterator[str]:
    """Settings that were changed and that nothing would read."""
    readers = {
        "inner_momentum": ("inner_optimizer", ("momentum",)),
        "inner_beta1": ("inner_optimizer", ("adamw",)),
        "inner_beta2": ("inner_optimizer", ("adamw",)),
        "inner_epsilon": ("inner_optimizer", ("adamw",)),
        "inner_weight_decay": ("inner_optimizer", ("adamw",)),
        "inner_lr_outer_lr": ("inner_lr_learned", ("layer", "element")),
        "outer_momentum": ("outer_optimizer", ("nesterov",)),
    }
    for name, (other, values) in readers.items():
        if getattr(c, name) != type(c).__dataclass_fields__[name].default and getattr(c, other) not in values:
            yield (
                f"{name}={getattr(c, name)} means nothing for {other}={getattr(c, other)}; leave it out, or"
                f" use {other} {' or '.join(values)}"
            )
    supports = find(c.algorithm).supports
    for name, unset in OPTIONAL.items():
        if getattr(c, name) != unset and name not in supports:
            yield (
                f"{name}={getattr(c, name)} is not supported by algorithm={c.algorithm}; leave it out, or use"
                f" {' or '.join(supporting(name))}"
            )
    keeps = "trajectory_memory_gib" in supports or c.multi_step_loss_steps or c.inner_lr_learned != "no"
    if c.trajectory_memory_gib is not None and not keeps:
        yield (
            f"trajectory_memory_gib={c.trajectory_memory_gib} means nothing for algorithm={c.algorithm},"
            " which keeps no trajectory; leave it out"
        )
    if c.eval_steps and not c.eval_episodes:
        yield (
            f"eval_steps={c.eval_steps} means nothing for eval_episodes=0, which evaluates nothing; leave"
            " it out"
        )
    if c.trajectory_memory_gib is not None and c.trajectory_memory_gib < 0:
        yield (
            f"trajectory_memory_gib={c.trajectory_memory_gib} is below 0;"
            " use 0 to keep the whole trajectory in host memory"
        )
    if c.trajectory_memory_gib is not None and not c.trajectory_memory_gib < math.inf:
        yield (
            f"trajectory_memory_gib={c.trajectory_memory_gib} is no number to compute with;"
            " use 0 or more, or leave it out for no limit"
        )


def _parallelism_conflicts(c: Any) -> Iterator[str]:
    """What pipeline stages and tensor parallelism do not go with; data parallelism and ZeRO 3 go with all of
    it.
    """
    stages, tensor = c.pipeline_stages, c.tensor_parallel_size
    if stages > 1 and tensor > 1:
        yield (
            f"pipeline_stages={stages} and tensor_parallel_size={tensor} are not combined; use one of them,"
            " with data parallelism beside it"
        )
    if c.pipeline_balance == "time" and stages == 1:
        yield "pipeline_balance=time means nothing for pipeline_stages=1; leave it out"
    if stages * tensor == 1:
        return
    spread = f"pipeline_stages={stages}" if stages > 1 else f"tensor_parallel_size={tensor}"
    if c.engine == "plain":
        yield (
            "engine=plain holds a whole model on one rank; leave out pipeline_stages and tensor_parallel_size"
        )
    of_stages = {
        "packing": "stages before the last run the base model, which does not know packed rows",
    }
    of_tensor = {
        "lora_r": "adapters are not cut with the weights that they stand beside",
        "packing": "packed rows are not tested with cut attention heads",
    }
    for name, why in (of_stages if stages > 1 else of_tensor).items():
        if getattr(c, name):
            yield f"{spread} with {name}={getattr(c, name)}: {why}; use ZeRO 3, or leave {name} out"
    frozen_body = find(c.algorithm).frozen_body
    if tensor > 1 and (c.prototype_gradient or frozen_body):
        what = f"algorithm={c.algorithm}" if frozen_body else "prototype_gradient=True"
        yield (
            f"{spread} with {what}: gradients back through features are not implemented for cut layers (each"
            " rank of a tensor set needs those of its rows, and one of them holds the rows); use ZeRO 3 or"
            " pipeline stages"
        )


def _algorithm_conflicts(c: Any) -> Iterator[str]:
    name, spec = c.algorithm, find(c.algorithm)
    head = spec.defaults.get("head_init", c.head_init)
    if c.head_init != head:
        yield (
            f"head_init={c.head_init} contradicts algorithm={name}, whose head is {head}; leave --head_init"
            " out"
        )
    if c.task_type != (spec.task_type or c.task_type):
        yield (
            f"task_type={c.task_type} does not go with algorithm={name}, which is for {spec.task_type}; use"
            " another algorithm"
        )
    if c.inner_steps == 0 and not spec.trains_nothing and spec.defaults.get("inner_steps") != 0:
        yield f"inner_steps=0 leaves algorithm={name} nothing to learn through; use 1 or more"
    if c.prototype_gradient and not (c.head_init == "prototype" and "prototype_gradient" in spec.supports):
        yield (
            f"prototype_gradient=True means nothing for algorithm={name} and head_init={c.head_init}; use it"
            " with head_init=prototype and an algorithm that differentiates through the inner loop"
        )
    yield from spec.conflicts(c)


def _inner_loop_conflicts(c: Any) -> Iterator[str]:
    name, inner, spec = c.algorithm, c.inner_optimizer, find(c.algorithm)
    if inner == "adamw" and spec.order > 1:
        yield (
            f"inner_optimizer=adamw with algorithm={name}: the meta-gradient through Adam's moments is not"
            " implemented; use sgd or momentum, or algorithm=fomaml or reptile"
        )
    if c.inner_optimizer_state == "kept" and not (
        inner == "adamw" and "inner_optimizer_state" in spec.supports
    ):
        yield (
            f"inner_optimizer_state=kept keeps Reptile's Adam moments, and here are algorithm={name} and"
            f" inner_optimizer={inner}; use reset"
        )
    learned = c.inner_lr_learned
    if learned == "element" and c.inner_lr_schedule != "constant":
        yield (
            f"inner_lr_schedule={c.inner_lr_schedule} with inner_lr_learned=element: one rate per element"
            " serves all steps; use constant, or inner_lr_learned=layer"
        )
    for item in c.inner_lr_groups:
        pattern, _, factor = item.rpartition("=")
        if not pattern or not is_number(factor) or not 0 <= float(factor) * c.inner_lr < LARGEST:
            yield (
                f"inner_lr_groups={item} is no PATTERN=FACTOR with a factor of 0 or more; write, say, head=10"
                " or '*embeddings*=0'"
            )
    if c.inner_lr_groups and spec.adapts != "all":
        yield (
            f"inner_lr_groups={' '.join(c.inner_lr_groups)} contradicts algorithm={name}, which is a choice"
            " of layers; leave it out"
        )


def _multi_task_conflicts(c: Any) -> Iterator[str]:
    """What one pass for several tasks does not go with."""
    if c.tasks_per_pass == "1":
        return
    spec = find(c.algorithm)
    if spec.frozen_body:
        wrong = {
            f"max_task_norm={c.max_task_norm}, which looks at each task's direction": (
                c.max_task_norm is not None
            ),
            f"max_task_loss={c.max_task_loss}, which may drop a task of several": c.max_task_loss is not None,
        }
    else:
        wrong = {
            f"lora_r=0, where tasks of {c.algorithm} need a whole model each": not c.lora_r,
            f"algorithm={c.algorithm}, which has no rule for several tasks": spec.multi_task is None,
            f"pipeline_stages={c.pipeline_stages}": c.pipeline_stages > 1,
            f"n_way_max={c.n_way_max}, where tasks have heads of different sizes": c.n_way_max is not None,
            "packing=True": c.packing,
            f"inner_optimizer_state={c.inner_optimizer_state}": c.inner_optimizer_state != "reset",
            f"inner_lr_learned={c.inner_lr_learned}": c.inner_lr_learned != "no",
            f"inner_lr_groups={' '.join(c.inner_lr_groups)}": bool(c.inner_lr_groups),
            f"multi_step_loss_steps={c.multi_step_loss_steps}": c.multi_step_loss_steps > 0,
            "prototype_gradient=True": c.prototype_gradient,
            "offload_outer=True": c.offload_outer,
        }
    for what, is_so in wrong.items():
        if is_so:
            yield (
                f"tasks_per_pass={c.tasks_per_pass} is not implemented with {what}; leave it out, or use"
                " --tasks_per_pass 1"
            )


def _compile_conflicts(c: Any) -> Iterator[str]:
    """A compiled model is one whole, without hooks and modules of its own that change from pass to pass."""
    wrong = {
        f"pipeline_stages={c.pipeline_stages}, whose stages are no whole model": c.pipeline_stages > 1,
        f"tensor_parallel_size={c.tensor_parallel_size}, whose layers talk to each other": (
            c.tensor_parallel_size > 1
        ),
        "engine=deepspeed, which hooks into modules": c.engine == "deepspeed",
        f"tasks_per_pass={c.tasks_per_pass}, whose tasks stand in for layers in each pass": (
            c.tasks_per_pass != "1" and not find(c.algorithm).frozen_body
        ),
        "gradient_checkpointing=True, which computes layers again": c.gradient_checkpointing,
        "packing=True": c.packing,
    }
    for what, is_so in wrong.items():
        if c.compile and is_so:
            yield f"compile=True does not go with {what}; leave one out"


def _outer_optimizer_conflicts(c: Any) -> Iterator[str]:
    name = c.outer_optimizer
    if name.lower() in NOT_ELEMENTWISE:
        yield (
            f"outer_optimizer={name} does not act element by element: {NOT_ELEMENTWISE[name.lower()]}, and"
            f" theta is held in shards; use {' or '.join(OUTER_OPTIMIZERS)}"
        )
    if name not in OUTER_OPTIMIZERS:
        yield f"outer_optimizer={name} is unknown; use {any_of(OUTER_OPTIMIZERS)}"


def _delay_conflicts(c: Any) -> Iterator[str]:
    if c.outer_delay > 1:
        yield f"outer_delay={c.outer_delay} is above 1: one reduction hides behind one outer step; use 0 or 1"
    if c.outer_delay and c.offload_outer:
        yield (
            f"outer_delay={c.outer_delay} with offload_outer=True: a sum in host memory is reduced piece by"
            " piece, and none of it would overlap; leave one out"
        )
    if c.outer_delay and c.inner_optimizer_state == "kept":
        yield (
            f"outer_delay={c.outer_delay} with inner_optimizer_state=kept: the moments that an inner loop"
            " begins with would be those of two outer steps before; use reset, or no delay"
        )
    for name, unset in {"outer_delay": 0, "reduce_dtype": "fp32"}.items():
        if getattr(c, name) != unset and find(c.algorithm).trains_nothing:
            yield (
                f"{name}={getattr(c, name)} means nothing for algorithm={c.algorithm}, which trains nothing;"
                " leave it out"
            )


def _elastic_conflicts(c: Any) -> Iterator[str]:
    """What does not go with groups that come and go."""
    for name in ("lighthouse", "group_name"):
        if getattr(c, name) is not None and not c.elastic:
            yield f"{name}={getattr(c, name)} means nothing without elastic; give --elastic, or leave it out"
    if not c.elastic:
        return
    if c.output_dir is None:
        yield (
            "elastic=True needs output_dir: every group must find the same folder; give one on a disk that"
            " all of them see"
        )
    for name, unset, why in (
        ("outer_delay", 0, "a lost group would take a meta-gradient on its way with it"),
        ("task_sharding", "global", "its meta-batches depend on the number of nodes"),
        ("pipeline_stages", 1, "stages are not tested with groups that heal"),
        ("tensor_parallel_size", 1, "tensor ranks are not tested with groups that heal"),
        ("load_best_model_at_end", False, "the best weights are not among what a group heals"),
        ("accept_changed_settings", [], "groups that are alive cannot change theirs"),
    ):
        if getattr(c, name) != unset:
            yield f"elastic=True with {name}={getattr(c, name)}: {why}; leave {name} out"
    if c.resume_from_checkpoint not in ("latest",):
        yield (
            f"elastic=True with resume_from_checkpoint={c.resume_from_checkpoint}: a group that comes back"
            " takes the newest state; leave it out"
        )
    if find(c.algorithm).trains_nothing:
        yield f"elastic=True means nothing for algorithm={c.algorithm}, which trains nothing; leave it out"


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
