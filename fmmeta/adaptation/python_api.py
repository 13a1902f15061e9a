"""Few-shot evaluation and adaptation from Python: the commands of the same names.

results = fmmeta.evaluate("runs/my-run/model", "data/intents.jsonl", method=["finetune", "prototype"])
adapted = fmmeta.adapt("runs/my-run/model", [("where is my card", "card_arrival"), ...])
adapted.predict(["has my card been sent?"])[0].output
fmmeta.load("adapted/cards").predict(["has my card been sent?"])
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any, TypeVar, cast

from fmmeta.adaptation import command as adapt_command
from fmmeta.adaptation import model as models
from fmmeta.adaptation.command import AdaptedModels
from fmmeta.adaptation.model import AdaptedModel
from fmmeta.common.errors import UsageError
from fmmeta.common.processes import refuse_while_importing, restored_process
from fmmeta.common.progress import Progress, terminal_log
from fmmeta.common.text import shortened
from fmmeta.config.fields import of_type, refuse_unknown
from fmmeta.config.settings import Config
from fmmeta.evaluation import command as evaluate_command
from fmmeta.evaluation.results import EvaluationResults
from fmmeta.evaluation.settings import SHARED_BY_PREDICT, AdaptConfig, EvaluateConfig, PredictConfig
from fmmeta.parallel.layout import Launch
from fmmeta.tasks.data.rows import Examples

Name = str | os.PathLike[str]
T = TypeVar("T")


def evaluate(
    model_name_or_path: Name, dataset: Sequence[Name] | Name, *, quiet: bool = True, **settings: Any
) -> EvaluationResults:
    """Few-shot scores of a model on episodes of held-out tasks.

    model_name_or_path: HF folder, hub id, or "tiny". dataset: one or more files, folders, hub ids, or
    "letters". quiet: False shows messages, progress and tables;
    True passes messages to handlers of the logger "fmmeta" only. settings: the flags of `fmmeta evaluate`.

    Returns the content of results.json: `accuracy` (0 to 1) and `loss` (nats) of the first method and k_shot,
    each with half its 95 % interval (`ci95`, `loss_ci95`; NaN for one episode), `ece` (0 to 1),
    `per_stratum`, and in `cells` the same for each method and k_shot with the scores of single episodes.
    Raises `UsageError`. Collective: world.

    >>> import fmmeta
    >>> results = fmmeta.evaluate("tiny", "letters", method=["finetune", "prototype"], k_shot=1, episodes=3)
    >>> [(cell["method"], cell["k_shot"], len(cell["scores"])) for cell in results["cells"]]
    [('finetune', 1, 3), ('prototype', 1, 3)]
    """
    refuse_while_importing("fmmeta.evaluate")
    values = {"model_name_or_path": model_name_or_path, "dataset": dataset, **settings}
    with restored_process(), nullcontext() if quiet else terminal_log():
        first = Launch.from_env(os.environ).global_rank == 0
        return evaluate_command.evaluate(
            settings_of(EvaluateConfig, values), progress=Progress(enabled=first, quiet=quiet)
        )


def adapt(
    model_name_or_path: Name,
    support: Examples | Name,
    *,
    query: Examples | Name | None = None,
    output_dir: Name | None = None,
    quiet: bool = True,
    **settings: Any,
) -> AdaptedModel:
    """Adapt a model to one task from a few labelled examples, in one process.

    model_name_or_path: HF folder, hub id, or "tiny". support: a file, or pairs of text and class (input and
    output with task_type=causal_lm), or rows as dictionaries. query: examples to answer and score, likewise.
    output_dir: folder for the adapted model, which must be empty; None writes nothing. quiet: as for
    `evaluate`. settings: the flags of `fmmeta adapt`. Raises `UsageError`.

    >>> import fmmeta
    >>> pairs = [("red", "colour"), ("blue", "colour"), ("one", "number"), ("two", "number")]
    >>> adapted = fmmeta.adapt("tiny", pairs, query=[("three", "number")], inner_steps=5)
    >>> adapted.labels, len(adapted.predictions), 1 <= adapted.inner_steps <= 10
    (('colour', 'number'), 1, True)
    """
    sets: dict[str, Any] = {"support": support, "query": query}
    files = {name: one for name, one in sets.items() if one is None or isinstance(one, (str, os.PathLike))}
    examples = {name: one for name, one in sets.items() if name not in files}
    if "support" in files and not support:
        raise UsageError(f"support={shortened(support)} names no file; give one, or pairs of text and class")
    values = {"model_name_or_path": model_name_or_path, "output_dir": output_dir or None, **files, **settings}
    with restored_process(), nullcontext() if quiet else terminal_log():
        return adapt_command.adapt(
            settings_of(AdaptConfig, values), Progress(enabled=True, quiet=quiet), **examples
        )


def adapt_many(
    model_name_or_path: Name,
    supports: Mapping[str, Examples | Name],
    *,
    output_dir: Name,
    quiet: bool = True,
    **settings: Any,
) -> AdaptedModels:
    """Adapt a model to many tasks, several in a pass where it has adapters (`lora_r`).

    model_name_or_path, settings: as for `adapt`. supports: name of each task -> its examples, as for `adapt`.
    output_dir: folder for the folders of the adapted models, one per task, with its name. A folder is
    complete or absent; the same call again learns the tasks without one. quiet: as for `evaluate`.

    Weights equal those of `adapt` to 1e-5 in fp32 with sgd and momentum. AdamW divides by |g| +
    `inner_epsilon`: where g is 0 but for rounding (a head's bias at balanced classes: 2e-8) the difference is
    a share of `inner_lr`. Measured: up to 1.2e-2 at the default 1e-8 and `inner_lr` 0.01; below 1e-6 at 1e-3.

    Returns a mapping from name to adapted model, which is loaded when it is accessed. A task that cannot be
    learned is in `failed`, with the reason, and not among the keys. Raises `UsageError` for what concerns all
    tasks. Collective: world.

    >>> import fmmeta, tempfile
    >>> colours = [("red", "warm"), ("orange", "warm"), ("blue", "cold"), ("green", "cold")]
    >>> numbers = [("one", "odd"), ("three", "odd"), ("two", "even"), ("four", "even")]
    >>> supports, folder = {"colours": colours, "numbers": numbers}, tempfile.mkdtemp()
    >>> models = fmmeta.adapt_many("tiny", supports, output_dir=folder, lora_r=4, inner_steps=3)
    >>> sorted(models), models.failed, models["numbers"].labels
    (['colours', 'numbers'], {}, ('even', 'odd'))
    """
    refuse_while_importing("fmmeta.adapt_many")
    if not isinstance(supports, Mapping):
        raise UsageError(
            f"supports={shortened(supports)} is no mapping; give {{name: examples}} of each task"
        )
    for name in ("support", "query"):
        if settings.get(name) is not None:
            raise UsageError(
                f"{name}={shortened(settings[name])} goes with one task, and adapt_many learns those of"
                " supports; leave it out, or use adapt"
            )
    for name in supports:
        if not isinstance(name, str):
            raise UsageError(f"supports: the name {shortened(name)} is no text; give a text")
    sources: dict[str, Any] = {
        name: os.fspath(one) if isinstance(one, os.PathLike) else one for name, one in supports.items()
    }
    values = {"model_name_or_path": model_name_or_path, "output_dir": output_dir or None, **settings}
    with restored_process(), nullcontext() if quiet else terminal_log():
        first = Launch.from_env(os.environ).global_rank == 0
        return adapt_command.adapt_many(
            settings_of(AdaptConfig, values), Progress(enabled=first, quiet=quiet), sources
        )


def load(folder: Name, **settings: Any) -> AdaptedModel:
    """Load a model that `fmmeta.adapt` or `fmmeta adapt` has written, in one process.

    folder: output_dir of `adapt`, a hub id of such a folder, or any trained classifier or language model.
    settings: the flags of `fmmeta predict` about the model, and micro_batch_size. Raises `UsageError`.

    >>> import fmmeta, tempfile
    >>> pairs = [("red", "colour"), ("blue", "colour"), ("one", "number"), ("two", "number")]
    >>> folder = tempfile.mkdtemp()
    >>> adapted = fmmeta.adapt("tiny", pairs, output_dir=folder, inner_steps=5)
    >>> fmmeta.load(folder).labels, fmmeta.load(folder).predict(["red"]) == adapted.predict(["red"])
    (('colour', 'number'), True)
    """
    with restored_process():
        values = {"model_name_or_path": folder, **settings}
        return models.load(settings_of(PredictConfig, values, SHARED_BY_PREDICT))


def settings_of(kind: type[T], values: Mapping[str, Any], known: Sequence[str] = ()) -> T:
    """Settings by name, converted as flags are; one value where a list is expected is a list of one.

    known: the names that are used; default: all. Raises `UsageError` for names and types that do not fit.
    """
    own = [item.name for item in fields(cast(Any, kind))]
    refuse_unknown(values, known or own, {*own, *Config.__dataclass_fields__})
    return kind(**{name: of_type(kind, name, value) for name, value in values.items()})
