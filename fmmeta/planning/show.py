"""A plan as text: a table of the best layouts, their memory as bars, the command of the best; and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

from fmmeta.config.settings import Config
from fmmeta.planning.layouts import PlannedLayout, Planner
from fmmeta.planning.memory import GIB, Estimate
from fmmeta.planning.strategies import Strategy, file_of

KINDS = {
    "weights": ("weights", "gathered"),
    "masters": ("master",),
    "theta": ("theta",),
    "meta-gradient": ("meta_gradient", "direction"),
    "moments": ("moments",),
    "kept": ("kept",),
    "gradients": ("gradients",),
    "activations": ("activations", "logits"),
    "buffers": ("buffers", "staging"),
}  # what a bar is made of
LETTERS = dict(zip(KINDS, "WMTDOKGAB", strict=True))
BAR = 60


def best(layouts: Sequence[PlannedLayout], lora: bool, top: int) -> list[PlannedLayout]:
    """The fastest that fits of each spread; how it saves memory beside is chosen for time."""
    found: dict[tuple[int, ...], PlannedLayout] = {}
    for one in layouts:
        strategy = one.strategy
        if not one.lacking and bool(strategy.lora_r) == lora:
            found.setdefault(
                (strategy.group_size, strategy.zero_stage, strategy.stages, strategy.tensor), one
            )
    return list(found.values())[:top]


def bar_of(memory: Estimate) -> dict[str, int]:
    """Bytes at the peak by the kinds of a bar."""
    return {name: sum(memory.peak.get(kind, 0) for kind in kinds) for name, kinds in KINDS.items()}


def text(planner: Planner, layouts: Sequence[PlannedLayout]) -> str:
    plan = planner.plan
    trained, _ = planner.counted(0, 1, 1)
    rows = (
        f"{planner.base.most_shots * (planner.base.most_classes or 1)} +"
        f" {plan.num_query * (planner.base.most_classes or 1)}"
    )
    fitting = sum(not one.lacking for one in layouts)
    nodes = f" ({plan.gpus_per_node} a node)" if plan.gpus > plan.gpus_per_node else ""
    lines = [
        (
            f"{plan.model_name_or_path}: {trained:,} parameters; {plan.gpus} GPUs of {plan.gpu_memory_gib:g}"
            f" GiB{nodes}"
        ),
        (
            f"{plan.algorithm}, {plan.tasks} tasks an outer step, {rows} rows of up to {plan.max_length}"
            f" tokens, {'bf16' if plan.bf16_planned else 'fp32'}"
        ),
        f"profile {planner.profile}",
        f"{fitting} of {len(layouts)} layouts fit into 90 % of the memory; the fastest of each spread:",
    ]
    for lora in (False, True):
        shown = best(layouts, lora, plan.top)
        if shown:
            lines += ["", "adapters (LoRA)" if lora else "all weights", *table(shown)]
    winners = [one for lora in (False, True) for one in best(layouts, lora, 1)]
    if winners:
        lines += [
            "",
            "memory of a rank, GiB: " + ", ".join(f"{letter} {name}" for name, letter in LETTERS.items()),
        ]
        lines += [bar(one, plan.gpu_memory_gib) for lora in (False, True) for one in best(layouts, lora, 5)]
        lines += [
            "",
            *(
                f"# {'adapters' if one.strategy.lora_r else 'all weights'}\n{command(planner, one.strategy)}"
                for one in winners
            ),
        ]
    return "\n".join(lines)


def table(shown: Sequence[PlannedLayout]) -> list[str]:
    head = [
        "group",
        "groups",
        "layout",
        "rows",
        "GiB",
        "host GiB",
        "step s",
        "efficiency",
        "GB in group",
        "GB across",
    ]
    cells = [
        [
            str(one.strategy.group_size),
            str(one.groups),
            str(one.strategy),
            str(one.rows),
            f"{one.memory.total / GIB:.1f}",
            f"{one.host_bytes / GIB:.0f}",
            number(one.step_seconds),
            f"{100 * one.efficiency:.0f} %",
            number(one.wire.total / 1e9),
            number(one.cross_bytes / 1e9),
        ]
        for one in shown
    ]
    widths = [max(len(row[i]) for row in [head, *cells]) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if i == 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *cells]
    ]


def number(value: float) -> str:
    """Three digits, without powers of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def bar(one: PlannedLayout, gpu_memory_gib: float) -> str:
    """A line of letters, as long as the share of the GPU that each kind takes."""
    drawn, at = "", 0.0
    for name, size in bar_of(one.memory).items():
        at += BAR * size / (gpu_memory_gib * GIB)
        drawn += LETTERS[name] * (round(at) - len(drawn))
    named = f"group of {one.strategy.group_size}, {one.strategy}"
    return f"|{drawn.ljust(BAR)}| {one.memory.total / GIB:5.1f}  {named}"


def command(planner: Planner, strategy: Strategy) -> str:
    """What starts the run: `deepspeed` on one node, `torchrun` on each of several."""
    plan = planner.plan
    nodes = max(1, plan.gpus // plan.gpus_per_node)
    start = f"deepspeed --num_gpus {plan.gpus}"
    if nodes > 1:
        start = (
            f"torchrun --nnodes {nodes} --nproc_per_node {plan.gpus_per_node} --rdzv_backend c10d"
            " --rdzv_endpoint $HEAD:29500"
        )
    return f"{start} launch/train.py {shlex.join(flags(planner, strategy))}"


def flags(planner: Planner, strategy: Strategy) -> list[str]:
    """Flags of the run: those that were given to the plan, and those of the layout, where they are not the
    defaults.
    """
    values = {**planner.plan.run_settings(), **strategy.settings(planner.plan.bf16_planned)}
    plain = strategy.group_size == 1 and not strategy.offload
    values["deepspeed"] = planner.plan.deepspeed or (None if plain else file_of(strategy))
    words = []
    for item in fields(Config):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        value = values.get(item.name)
        if value is None or (value == default and item.name != "group_size"):
            continue
        words += [f"--{item.name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        if isinstance(value, bool):
            words[-1:] = [] if value else ["false"]
    return words


def as_json(planner: Planner, layouts: Sequence[PlannedLayout]) -> dict[str, Any]:
    plan = planner.plan
    trained, frozen = planner.counted(0, 1, 1)
    return {
        "model": plan.model_name_or_path,
        "parameters": trained + frozen,
        "gpus": plan.gpus,
        "gpu_memory_gib": plan.gpu_memory_gib,
        "tasks": plan.tasks,
        "profile": asdict(planner.profile),
        "left_out": planner.refused,
        "layouts": [facts(planner, one) for one in layouts],
    }


def facts(planner: Planner, one: PlannedLayout) -> dict[str, Any]:
    strategy = one.strategy
    named = {**strategy.settings(planner.plan.bf16_planned), "group_size": strategy.group_size}
    wire = {kind: size for kind, size in asdict(one.wire).items() if kind != "collectives"}
    return {
        "fits": not one.lacking,
        **named,
        "num_groups": one.groups,
        "rows": one.rows,
        "zero_stage": strategy.zero_stage,
        "offload": strategy.offload,
        "bytes_per_rank": {**asdict(one.memory), "total": one.memory.total},
        "lacking_bytes": round(one.lacking),
        "host_bytes_per_node": one.host_bytes,
        "bytes_per_outer_step": {**wire, "cross": one.cross_bytes},
        "step_seconds": one.step_seconds,
        "seconds": asdict(one.step),
        "efficiency": one.efficiency,
        "command": command(planner, strategy),
    }


def lacking(planner: Planner, layouts: Sequence[PlannedLayout]) -> str:
    """One line for a model that fits nowhere: what comes nearest, and what it lacks."""
    plan = planner.plan
    if not layouts:
        why = next(iter(planner.refused), "nothing was left to plan")
        return f"gpus={plan.gpus}: no layout goes with these settings ({why})"
    one = layouts[0]
    strategy, host = one.strategy, one.memory.total <= planner.gpu_bytes
    where, has = ("host", plan.host_memory_gib or 0.0) if host else ("gpu", plan.gpu_memory_gib)
    needs = f"{one.host_bytes / GIB:.3g} GiB of a node's host" if host else f"{one.memory} per rank"
    nearest = f"group_size {strategy.group_size}, {strategy}, micro_batch_size {strategy.micro_batch_size}"
    return (
        f"{where}_memory_gib={has:g} holds no layout of {plan.model_name_or_path} on {plan.gpus} GPUs; the"
        f" nearest ({nearest}) needs {needs}, {one.lacking / GIB:.3g} GiB more than 90 % of it; use more GPUs"
        " or memory, a shorter --max_length, or --lora_r"
    )
