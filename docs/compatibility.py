"""Writes the tables of what goes together in docs/reference/what-works.md, by the conflicts in the code and
the parity cases of the tests.

python docs/compatibility.py

A combination goes together if `Config` accepts it. It is "yes" if a case of the parity tests runs it, else
"not tested".
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
START = "<!-- tables: python docs/compatibility.py -->\n"
ALGORITHMS = (
    *("fomaml", "reptile", "maml", "meta_sgd", "boil", "proto_maml", "anil", "protonet", "imaml", "joint"),
    *("meta_icl", "in_context", "ttt", "none"),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {"engine": "plain"},
    "ZeRO 0-2": {"engine": "deepspeed"},
    "ZeRO 3": {"engine": "deepspeed"},
    "stages": {"pipeline_stages": 2},
    "tensor ranks": {"tensor_parallel_size": 2},
    "stages of tensor ranks": {"pipeline_stages": 2, "tensor_parallel_size": 2},
}
WHOLE = ("plain", "ZeRO 0-2")  # where each rank runs the whole model and holds its weights
CAUSAL, STREAM = {"task_type": "causal_lm"}, {"task_type": "stream"}
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "LoRA": {"lora_r": 4},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "packed rows": {"packing": True, **CAUSAL},
    "outer vectors in host memory": {"offload_outer": True},
    "learned inner rates": {"inner_lr_learned": "layer"},
    "multi-step loss": {"multi_step_loss_steps": 4},
    "gradients through prototypes": {"head_init": "prototype", "prototype_gradient": True},
    "inner AdamW": {"inner_optimizer": "adamw"},
    "batches of the support set": {"support_batch_size": 4},
    "several tasks in a pass": {"tasks_per_pass": "2"},
    "several tasks in a pass, LoRA": {"tasks_per_pass": "2", "lora_r": 4},
    "bounded staleness": {"max_staleness": 2},
    "gradient noise scale": {"gradient_noise_scale": True},
    "dynamic schedule": {"task_schedule": "dynamic"},
    "elastic groups": {"elastic": True, "output_dir": "run"},
    "compiled": {"compile": True},
    "a collate function": {"task_type": "examples.own_inputs:spec"},
}
# Tests outside of the matrix that compare theta with another run or with the oracle.
ELSEWHERE = {
    ("dynamic schedule", "plain"): "tests/distributed/test_task_schedule.py",
    ("elastic groups", "plain"): "tests/distributed/test_elastic.py",
    ("elastic groups", "ZeRO 0-2"): "tests/distributed/test_elastic.py",
    ("compiled", "plain"): "tests/unit/test_forward_options.py",
    ("in_context", "plain"): "tests/unit/test_answers.py",
    ("none", "plain"): "tests/unit/test_joint.py",
}
OF_KIND = "ttt"  # an algorithm of one kind of task, which the matrix does not have
MODULES = ("bounded_staleness", "multi_task", "noise_scale", "support_batches")


def accepted(settings: dict[str, Any], whole: bool) -> bool:
    """Whether a run has these settings in some task type. whole: whether each rank runs the whole model and
    holds its weights.
    """
    from fmmeta.common.errors import UsageError
    from fmmeta.config.settings import Config
    from fmmeta.parallel.costs import second_order_by_autograd

    for task in ({}, CAUSAL, STREAM):
        try:
            second_order_by_autograd(Config(**{**task, **settings}), whole)
        except UsageError:
            continue
        return True
    return False


@cache
def parity_cases() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Layout and settings of every case that a test compares with the oracle."""
    matrix: Any = import_module("tests.support.matrix")
    cases = [*matrix.full(), *matrix.pairwise(), *matrix.spread()]
    for name in MODULES:
        cases += import_module(f"tests.distributed.test_{name}").CASES
    learners = import_module("tests.distributed.test_learner_parity")
    of_kind = [  # what else they set has no row in the tables
        (layout_of(case), settings_of(replace(case, also="nothing"), matrix))
        for case in learners.cases_of([*learners.FAST, *learners.SLOW])
        if case.algorithm.startswith(OF_KIND)
    ]
    return (*((layout_of(case), settings_of(case, matrix)) for case in cases), *of_kind)


def layout_of(case: Any) -> str:
    if case.stages > 1:
        return "stages of tensor ranks" if case.tensor > 1 else "stages"
    if case.tensor > 1:
        return "tensor ranks"
    return {"plain": "plain", 3: "ZeRO 3"}.get(case.stage, "ZeRO 0-2")


def settings_of(case: Any, matrix: Any) -> dict[str, Any]:
    rule = matrix.VARIANTS.get(case.algorithm, {"algorithm": case.algorithm})
    rule = {**rule, "algorithm": rule["algorithm"].rpartition(":")[2].lower()}  # a slow copy in tests
    return {"bf16": case.dtype == "bf16", "head_init": case.head, **rule, **case.settings}


def is_tested(wanted: dict[str, Any], layout: str | None = None) -> bool:
    """Whether a case has these settings, those that are numbers with any value but 0."""

    def agrees(found: Any, value: Any) -> bool:
        return found == value or (not isinstance(value, str) and bool(found) and bool(value))

    wanted = {name: value for name, value in wanted.items() if name != "engine" and value != "causal_lm"}
    return any(
        layout in (None, at) and all(agrees(found.get(name), value) for name, value in wanted.items())
        for at, found in parity_cases()
    )


def cell(goes: bool, tested: bool) -> str:
    return "-" if not goes else "yes" if tested else "not tested"


def by_layout(name: str, settings: dict[str, Any]) -> tuple[str, ...]:
    """A row of the first table."""
    cells = [
        cell(
            any(accepted({**settings, **at, **rule}, layout in WHOLE) for rule in rules(settings)),
            is_tested(settings, layout) or (name, layout) in ELSEWHERE,
        )
        for layout, at in LAYOUTS.items()
    ]
    return (name, *cells)


def rules(settings: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """Algorithms with which an option is tried."""
    tried = [{"algorithm": name} for name in ("fomaml", "reptile", "anil")]
    return [{}] if "algorithm" in settings else tried


def by_algorithm(option: str) -> tuple[str, ...]:
    """A row of the second table, on one rank."""
    cells = []
    for name in ALGORITHMS:
        settings = {"algorithm": name, **OPTIONS[option]}
        cells.append(cell(accepted(settings, whole=True), is_tested(settings)))
    return (option, *cells)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def content() -> str:
    layouts = [by_layout(name, {"algorithm": name}) for name in ALGORITHMS]
    options = [by_layout(name, settings) for name, settings in OPTIONS.items()]
    return (
        "\n### Layouts\n\n"
        + table(["", *LAYOUTS], [*layouts, *options])
        + "\n### Algorithms and options\n\n"
        + table(["", *ALGORITHMS], [by_algorithm(option) for option in OPTIONS])
    )


def page(text: str) -> str:
    """The page with new tables after its mark."""
    before, _ = text.split(START)
    return before + START + content()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    file = ROOT / "docs" / "reference" / "what-works.md"
    file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
