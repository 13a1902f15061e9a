"""Few-shot evaluation and adaptation from Python: the commands of the same names, in one process.

results = fmmeta.evaluate("runs/my-run/model", ["data/intents.jsonl"], method=["finetune", "prototype"],
k_shot=[1, 5]) adapted = fmmeta.adapt("runs/my-run/model", [("where is my card", "card_arrival"), ...],
output_dir="my-model") adapted.predict(["has my card been sent?"])[0].output
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

from fmmeta.adaptation import command as adapt_command
from fmmeta.adaptation.adapted_model import AdaptedModel
from fmmeta.adaptation.command import Examples
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.common.text import shortened
from fmmeta.config.renamed import refuse
from fmmeta.config.values import of_type
from fmmeta.evaluation import command as evaluate_command
from fmmeta.evaluation.settings import AdaptConfig, EvaluateConfig

Name = str | os.PathLike[str]
T = TypeVar("T")


def evaluate(
    model_name_or_path: Name, dataset: Sequence[Name] | Name, *, quiet: bool = True, **settings: Any
) -> dict[str, Any]:
    """Few-shot scores of a model, as results.json has them.

    `settings`: the flags of `fmmeta evaluate`. Raises `UsageError`.
    """
    given = settings_of(
        EvaluateConfig, {"model_name_or_path": model_name_or_path, "dataset": dataset, **settings}
    )
    return evaluate_command.evaluate(given, Progress(enabled=not quiet))


def adapt(
    model_name_or_path: Name,
    support: Examples | Name,
    *,
    query: Examples | Name | None = None,
    output_dir: Name | None = None,
    quiet: bool = True,
    **settings: Any,
) -> AdaptedModel:
    """Learn one task from a file, or from pairs of text and class (input and output for causal_lm); so for
    the query set.

    settings: the flags of `fmmeta adapt`. Writes an HF folder if `output_dir` says where. Raises
    `UsageError`.
    """
    files, examples = dict[str, Any](), dict[str, Examples | None]()
    for name, value in (("support", support), ("query", query)):
        if value is None or isinstance(value, (str, os.PathLike)):
            files[name], examples[name] = value, None
        else:
            examples[name] = listed(name, value)
    if examples["support"] is None and not files["support"]:
        raise UsageError(f"support={shortened(support)} names no file; give one, or pairs of text and class")
    given = settings_of(
        AdaptConfig,
        {"model_name_or_path": model_name_or_path, "output_dir": output_dir or "", **files, **settings},
    )
    return adapt_command.adapt(given, Progress(enabled=not quiet), examples["support"], examples["query"])


def listed(name: str, examples: Any) -> Examples:
    """Examples as a list. Raises `UsageError` for none."""
    if isinstance(examples, Mapping) or not isinstance(examples, Iterable):
        raise UsageError(
            f"{name}={shortened(examples)} is neither a file nor pairs; give [(text, class), ...]"
        )
    if not (found := list(examples)):
        raise UsageError(f"{name}=[] holds no examples; give pairs of text and class")
    return found


def settings_of(kind: type[T], values: Mapping[str, Any]) -> T:
    """Settings by name, as flags would give them: of their types, and one value where a list is expected is a
    list of one.

    Raises `UsageError` for names and types that do not fit.
    """
    known, given = {item.name: item for item in fields(cast(Any, kind))}, {}
    refuse(values, known)
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
            raise UsageError(
                f"{name}={shortened(value)} is no setting;"
                f" {f'did you mean {close[0]}?' if close else 'leave it out'}"
            )
        given[name] = of_type(kind, name, value)
    return kind(**given)
