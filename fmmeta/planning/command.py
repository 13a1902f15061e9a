"""`fmmeta plan`: from a config.json and a number of GPUs to the layouts that fit, and the command that runs
the best one; as text and JSON.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.install import shipped
from fmmeta.common.text import counted, three_digits, to_json
from fmmeta.config.fields import default_of, shown
from fmmeta.config.settings import Config
from fmmeta.learners.from_gguf import as_folder
from fmmeta.parallel.memory import GIB
from fmmeta.planning.layouts import PlannedLayout, Planner, Strategy
from fmmeta.planning.machines import find
from fmmeta.planning.settings import PlanConfig

ADAPTERS = "adapters (LoRA)"


def run(plan: PlanConfig) -> None:
    """Print the plan. Raises `UsageError` if nothing fits."""
    plan = replace(
        plan, model_name_or_path=as_folder(plan.model_name_or_path, partial(print, file=sys.stderr))
    )
    profile = find(plan.machine)
    if plan.gpu_memory_gib is None:
        if not profile.gpu_memory_gib:
            raise UsageError(
                f"gpu_memory_gib is not given, and machine={plan.machine} names no memory of a GPU; give it,"
                " such as --gpu_memory_gib 80"
            )
        plan = replace(plan, gpu_memory_gib=round(profile.gpu_memory_gib, 1))
    planner = Planner(plan, profile)
    layouts = planner.layouts()
    fits = bool(layouts) and not layouts[0].lacking
    if plan.json:
        print(to_json(as_json(planner, layouts), indent=1))
    elif fits:
        print(text(planner, layouts))
    if not fits:
        raise UsageError(lacking(planner, layouts))


def best(layouts: Sequence[PlannedLayout]) -> dict[str, list[PlannedLayout]]:
    """The fastest layout that fits for each group size, ZeRO stage and model split, by what is trained."""
    found: dict[str, dict[tuple[int, ...], PlannedLayout]] = {"all weights": {}, ADAPTERS: {}}
    for one in layouts:
        way = one.strategy
        if not one.lacking:
            trained = ADAPTERS if way.lora_r else "all weights"
            found[trained].setdefault((way.group_size, way.zero_stage, way.stages, way.tensor), one)
    return {trained: list(ways.values()) for trained, ways in found.items() if ways}


def text(planner: Planner, layouts: Sequence[PlannedLayout]) -> str:
    plan, base, found = planner.plan, planner.base, best(layouts)
    if base.outer_parameters:
        named = f"outer parameters: {' '.join(base.outer_parameters)}"
        found = {f"{named}{', under adapters' * (kind == ADAPTERS)}": ways for kind, ways in found.items()}
    counts, _ = planner.counts(0, 1, 1)
    classes = base.largest_way
    nodes = f" ({plan.gpus_per_node} a node)" if plan.gpus > plan.gpus_per_node else ""
    lines = [
        f"{plan.model_name_or_path}: {counts.all:,} parameters; {plan.gpus} GPUs of"
        f" {plan.gpu_memory_gib:g} GiB{nodes}",
        f"{plan.run_algorithm}, {plan.tasks} tasks an outer step, {base.most_support * classes} +"
        f" {plan.num_query * classes} rows of up to {base.max_length} tokens,"
        f" {'bf16' if plan.bf16_planned else 'fp32'}",
        f"profile {planner.profile}",
        f"{sum(not one.lacking for one in layouts)} of {len(layouts)} layouts fit into 90 % of the memory;"
        " the fastest of each kind:",
    ]
    for trained, ways in found.items():
        lines += ["", trained, *table(ways[: plan.top])]
    if found:
        fastest = next(iter(found.values()))[0]
        if fastest.idle:
            busy = plan.tasks * fastest.strategy.group_size
            lines += [
                "",
                f"groups without a task: {fastest.idle} of {fastest.groups}; {busy} GPUs are as fast with"
                f" {counted(plan.tasks, 'task')} an outer step: give --gpus {busy}, --meta_batch_size"
                f" {fastest.groups} or more, or a larger --group_size",
            ]
        if {*found} == {"all weights", ADAPTERS}:
            (_, whole), (_, adapters) = found.items()
            cheaper = whole[0].step.total / adapters[0].step.total
            less = three_digits(cheaper)
            lines += ["", f"a task costs {less} times less with adapters than with all weights"]
        lines += [
            "",
            *(f"memory of a rank, {trained}: {ways[0].memory}" for trained, ways in found.items()),
            "",
        ]
        where = "; run on each node, with HEAD set to the name of the first" if nodes else ""
        lines += [
            f"# {trained}{where}\n{run_command(planner, ways[0].strategy)}" for trained, ways in found.items()
        ]
    return "\n".join(lines)


def table(shown: Sequence[PlannedLayout]) -> list[str]:
    rows = [
        {
            "group": str(one.strategy.group_size),
            "groups": str(one.groups) + (f" ({one.idle} idle)" if one.idle else ""),
            "layout": str(one.strategy),
            "rows": str(one.rows),
            "GiB": f"{one.memory.total / GIB:.1f}",
            "host GiB": f"{one.host_bytes / GIB:.0f}",
            "step s": three_digits(one.step.total),
            "efficiency": f"{100 * one.efficiency:.0f} %",
            "GB in group": three_digits(one.wire.total / 1e9),
            "GB across": three_digits(one.cross_bytes / 1e9),
        }
        for one in shown
    ]
    rows.insert(0, {name: name for name in rows[0]})
    widths = {name: max(len(row[name]) for row in rows) for name in rows[0]}
    return [
        "  ".join(f"{cell:{'<' if name == 'layout' else '>'}{widths[name]}}" for name, cell in row.items())
        for row in rows
    ]


def run_command(planner: Planner, strategy: Strategy) -> str:
    """What starts the run: `deepspeed` on one node, `torchrun` on each of several. In a checkout they start
    its script, elsewhere the installed package.
    """
    plan, script = planner.plan, Path("launch/train.py")
    start, module = f"deepspeed --num_gpus {plan.gpus}", "--module"
    if plan.gpus > plan.gpus_per_node:
        start, module = (
            (
                f"torchrun --nnodes {plan.gpus // plan.gpus_per_node} --nproc_per_node {plan.gpus_per_node}"
                " --rdzv_backend c10d --rdzv_endpoint $HEAD:29500"
            ),
            "-m",
        )
    here = script.is_file() and script.samefile(shipped("launch") / script.name)
    return f"{start} {script if here else f'{module} fmmeta train'} {shlex.join(flags(planner, strategy))}"


def flags(planner: Planner, strategy: Strategy) -> list[str]:
    """Flags of the run that are not the defaults: those given to the plan, and those of the layout."""
    values = {**planner.plan.run_settings(), **strategy.settings(planner.plan.bf16_planned)}
    if planner.plan.deepspeed is None and (strategy.group_size > 1 or strategy.offload):
        values["deepspeed"] = strategy.deepspeed_file
    words = []
    for item in fields(Config):
        value = values.get(item.name)
        if value is None or (value == default_of(item) and item.name != "group_size"):
            continue
        words += [f"--{item.name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        if isinstance(value, bool):
            words[-1:] = [] if value else ["false"]
    return words


def as_json(planner: Planner, layouts: Sequence[PlannedLayout]) -> dict[str, Any]:
    plan = planner.plan
    return {
        "model": plan.model_name_or_path,
        "parameters": planner.counts(0, 1, 1)[0].all,
        "gpus": plan.gpus,
        "gpu_memory_gib": plan.gpu_memory_gib,
        "tasks": plan.tasks,
        "profile": asdict(planner.profile),
        "left_out": planner.refused,
        "layouts": [layout_json(planner, one) for one in layouts],
    }


def layout_json(planner: Planner, one: PlannedLayout) -> dict[str, Any]:
    strategy = one.strategy
    wire = {kind: size for kind, size in asdict(one.wire).items() if kind != "collectives"}
    return {
        "fits": not one.lacking,
        **strategy.settings(planner.plan.bf16_planned),
        "group_size": strategy.group_size,
        "num_groups": one.groups,
        "idle_groups": one.idle,
        "rows": one.rows,
        "zero_stage": strategy.zero_stage,
        "offload": strategy.offload,
        "bytes_per_rank": {**one.memory.kinds, "host": one.memory.host, "total": one.memory.total},
        "lacking_bytes": round(one.lacking),
        "host_bytes_per_node": one.host_bytes,
        "bytes_per_outer_step": {**wire, "cross": one.cross_bytes},
        "step_seconds": one.step.total,
        "seconds": asdict(one.step),
        "efficiency": one.efficiency,
        "command": run_command(planner, strategy),
    }


def lacking(planner: Planner, layouts: Sequence[PlannedLayout]) -> str:
    """One line for a model that fits nowhere: the nearest layout, and what it lacks."""
    plan = planner.plan
    if not layouts:
        names = ("group_size", "zero_stage", "offload", "pipeline_stages", "tensor_parallel_size")
        values = [(name, getattr(plan, name)) for name in names]
        given = [f"{name}={shown(one)}" for name, one in values if one not in (None, [], "auto")]
        contradict = f"{', '.join(given)} contradict each other; leave one out"
        return f"gpus={plan.gpus}: no layout is possible ({next(iter(planner.refused), contradict)})"
    one, strategy = layouts[0], layouts[0].strategy
    where, has, needs = "gpu", plan.gpu_memory_gib, f"{one.memory} per rank"
    if one.memory.total - planner.gpu_bytes < one.lacking:  # the host lacks more
        where, has = "host", plan.host_memory_gib or 0.0
        needs = f"{one.host_bytes / GIB:.3g} GiB of a node's host"
    nearest = f"group_size {strategy.group_size}, {strategy}, micro_batch_size {strategy.micro_batch_size}"
    return (
        f"{where}_memory_gib={has:g} holds no layout of {plan.model_name_or_path} on {plan.gpus} GPUs; the"
        f" nearest ({nearest}) needs {needs}, {one.lacking / GIB:.3g} GiB more than 90 % of it; use more GPUs"
        " or memory, a shorter --max_length, or --lora_r"
    )
