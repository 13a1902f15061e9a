"""Few-shot evaluation and adaptation from Python: the commands of the same names, in one process.

results = fmmeta.evaluate("runs/my-run/model", ["data/intents.jsonl"], method=["finetune", "prototype"], k_shot=[1, 5])
adapted = fmmeta.adapt("runs/my-run/model", [("where is my card", "card_arrival"), ...], output_dir="my-model")
adapted.predict(["has my card been sent?"])[0].output
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fmmeta.fewshot import adaptation, evaluation
from fmmeta.fewshot.adapted import Adapted
from fmmeta.fewshot.settings import AdaptConfig, EvaluateConfig
from fmmeta.progress import Progress


def evaluate(model_name_or_path: str, dataset: Sequence[str] | str, *, quiet: bool = True, **settings: Any) -> dict[str, Any]:
    """Few-shot scores of a model, as results.json has them. `settings`: the flags of `fmmeta evaluate`. Raises `UsageError`."""
    names = [dataset] if isinstance(dataset, str) else list(dataset)
    given: dict[str, Any] = {**settings}
    for name in {"method", "k_shot"} & set(given):
        given[name] = list(given[name]) if isinstance(given[name], (list, tuple)) else [given[name]]
    return evaluation.evaluate(EvaluateConfig(model_name_or_path=str(model_name_or_path), dataset=names, **given),
                             Progress(speaks=not quiet))  # fmt: skip


def adapt(model_name_or_path: str, support: Sequence[tuple[str, str]] | str | Path, *, output_dir: str | Path | None = None,
          quiet: bool = True, **settings: Any) -> Adapted:  # fmt: skip
    """Learn one task from a file, or from pairs of text and class (input and output for causal_lm).

    settings: the flags of `fmmeta adapt`. Writes an HF folder if `output_dir` says where. Raises `UsageError`.
    """
    file = str(support) if isinstance(support, (str, Path)) else ""
    given = AdaptConfig(model_name_or_path=str(model_name_or_path), support=file, output_dir=str(output_dir or ""), **settings)
    return adaptation.adapt(given, Progress(speaks=not quiet), () if file else [tuple(pair) for pair in support])  # type: ignore[misc]
