"""`fmmeta adapt`: adapts a model to one task from a few labelled examples and writes a Hugging Face folder.

    support file --> number of inner steps, by cross-validation --> inner loop on all examples
                 --> model folder, model card, predictions

The inner loop has the settings of meta-training (stored in fmmeta.json) unless flags override them. Runs in
one process.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fmmeta.adaptation.adapted_model import AdaptedModel
from fmmeta.adaptation.model_card import write_card
from fmmeta.adaptation.single_process import LoadedModel, load_single_process
from fmmeta.checkpoint.hf_export import export
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.common.security import make_folders, remove_empty
from fmmeta.common.text import shortened
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import AdaptConfig
from fmmeta.evaluation.stored_lrs import stored_rates
from fmmeta.meta.algorithms import setup as rules
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.models.stored_settings import trained_with
from fmmeta.tasks.batching import Example
from fmmeta.tasks.data.columns import Table, tabulate
from fmmeta.tasks.data.encode import encode
from fmmeta.tasks.data.rows import Row, read_file
from fmmeta.tasks.data.used_splits import few

Examples = Sequence[tuple[Any, Any] | Mapping[str, Any]]
"""Text and class, or input and output; or as rows of a file have them."""
FOLDS = 2  # most examples of a class that are left out in turn; each costs an inner loop


def run(settings: AdaptConfig) -> None:
    """`fmmeta adapt`: adapt and tell."""
    for name in ("support", "output_dir"):
        if not getattr(settings, name):
            raise UsageError(f"{name} is missing; give --{name}")
    progress = Progress(speaks=True)
    adapted = adapt(settings, progress)
    if adapted.accuracy is not None:
        progress.notice(
            f"accuracy on {settings.query}: {100 * adapted.accuracy:.1f} % of {len(adapted.predictions)};"
            f" answers in {Path(settings.output_dir) / 'predictions.jsonl'}"
        )
    progress.notice(f"model {settings.output_dir}")


def adapt(
    settings: AdaptConfig,
    progress: Progress,
    support_set: Examples | None = None,
    query_set: Examples | None = None,
) -> AdaptedModel:
    """Learn the task of `settings.support`, or of `support_set` where it is given; so for the query set.

    The folder is written if `output_dir` says where. Raises `UsageError`.
    """
    config = settings.run_config(n_way=2)
    support = read_task("support", support_set or settings.support, config, progress.notice)
    labels = tuple(sorted(set(support.right))) if config.task_type == "classification" else ()
    if len(labels) == 1:
        raise UsageError(
            f"support={settings.support} has one class only, {labels[0]!r}; give examples of two or more"
        )
    for one in trained_with([settings.model_name_or_path]) if labels else ():
        if shared := sorted(one.trained_names("class") & set(labels)):
            what = f"{settings.support or 'support'}: {len(shared)} of {len(labels)} classes ({few(shared)})"
            progress.notice(
                f"{what} have names of classes that the model was trained on with dataset={one.dataset}; its "
                "accuracy on them says nothing of new classes"
            )
    asked = query_set or settings.query
    query = read_task("query", asked, config, progress.notice, unique=False) if asked else None
    unknown = sorted(set(query.right) - set(labels)) if query is not None and labels else []
    if unknown:
        raise UsageError(
            f"query={settings.query} has the class {unknown[0]!r}, of which the support set has none; add"
            " some"
        )
    with new_folder(settings.output_dir) as folder:
        adapted = learn(settings, support, labels, progress)
        if query is not None:
            answers = adapted.predict(query.left, settings.max_new_tokens)
            adapted.predictions = [
                replace(one, truth=truth) for one, truth in zip(answers, query.right, strict=True)
            ]
        if folder is not None:
            write(adapted, folder, settings, support, config.inner_steps)
            adapted.output_dir = str(folder)
    return adapted


def learn(settings: AdaptConfig, support: Table, labels: tuple[str, ...], progress: Progress) -> AdaptedModel:
    """Choose the steps and take them."""
    config = settings.run_config(n_way=len(labels) or 2)
    if lost := settings.lost_head(config):
        progress.notice(lost)
    chooses = settings.early_stopping and config.inner_lr_schedule == "constant" and config.inner_steps > 0
    folds = leave_out(support, labels) if chooses else []
    config = replace(config, inner_steps=config.inner_steps * (2 if folds else 1))
    single = load_single_process(config, progress, labels, settings.bf16)
    rows, inner, left_out, steps = (
        encode_task(single, support, labels),
        inner_loop(settings, single),
        None,
        config.inner_steps,
    )
    if folds:
        steps, left_out = choose_steps(single, inner, rows, folds, progress)
        progress.notice(
            f"{steps} inner steps: {100 * left_out:.1f} % right of examples that were left out, of up to "
            f"{config.inner_steps} steps"
        )
    dealt = single.dealer.deal(rows)
    passes = replace(inner, steps=steps).adapt(single.worker, single.worker.read(), dealt).passes
    after = single.worker.forward(dealt)  # the last step's loss as well
    if not all(one.finite for one in (*passes, after)):
        raise UsageError(
            f"inner_lr={config.inner_lr}: the loss on the support set is not finite after {steps} inner"
            " steps; lower --inner_lr"
        )
    if passes and after.loss > passes[0].loss:
        progress.notice(
            f"inner_lr={config.inner_lr}: the loss on the support set rose from {passes[0].loss:.3g} to "
            f"{after.loss:.3g}; lower --inner_lr"
        )
    return AdaptedModel(labels, steps, left_out, single)


def write(
    adapted: AdaptedModel, folder: Path, settings: AdaptConfig, support: Table, inner_steps: int
) -> None:
    """The adapted model as a folder: weights, head, card, answers.

    It stores `inner_steps`, not those of this task.
    """
    single = adapted.single
    config = replace(single.config, head_init="learned", inner_steps=inner_steps)
    learned = settings.remembered().get("inner_rates") is not None and not settings.own_rates()
    rates = inner_loop(settings, single).rates if learned else None
    export(
        folder,
        single.worker.read(),
        single.worker,
        single.frozen,
        config,
        single.description,
        single.tokenizer,
        single.ranks,
        rates,
        folder / "merged",
        trained_with([settings.model_name_or_path]),
    )
    write_card(adapted, folder, settings, support)
    if adapted.predictions:
        lines = "".join(f"{one.line()}\n" for one in adapted.predictions)
        (folder / "predictions.jsonl").write_text(lines, encoding="utf-8")


@contextmanager
def new_folder(output_dir: str) -> Iterator[Path | None]:
    """An empty folder for the block to fill, None without a name; as it was before if the block raises.

    Raises `UsageError`.
    """
    if not output_dir:
        yield None
        return
    folder = Path(output_dir)
    try:
        made = make_folders(folder)
        if any(folder.iterdir()):
            raise UsageError(
                f"output_dir={folder} is not empty; choose another, so that nothing is overwritten"
            )
    except OSError as error:
        raise UsageError(f"output_dir={folder} cannot be made: {error.strerror}; choose another") from None
    try:
        yield folder
    except BaseException:
        for inside in folder.iterdir():
            shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
        remove_empty(made)
        raise


def read_task(
    setting: str, given: str | Examples, config: Config, notice: Callable[[str], None], unique: bool = True
) -> Table:
    """The rows of a file, or examples, as one task; unique: duplicates count once.

    Raises `UsageError`.
    """
    name = given if isinstance(given, str) else setting
    rows = rows_of(setting, given, config)
    return tabulate(name, rows, config, lambda text: notice(f"{name}: {text}"), one_task=True, unique=unique)


def rows_of(setting: str, given: str | Examples, config: Config) -> list[Row]:
    """The rows of a file, or examples as if they came from one. Raises `UsageError`."""
    if isinstance(given, str):
        return read_file(Path(given))
    causal = config.task_type == "causal_lm"
    left = (config.input_column or "input") if causal else (config.text_column or "text")
    right = (config.output_column or "output") if causal else (config.label_column or "label")
    rows = []
    for place, one in enumerate(given):
        origin = f"{setting}[{place}]"
        if isinstance(one, Mapping):
            rows.append(Row({str(name): value for name, value in one.items()}, origin))
        elif isinstance(one, (list, tuple)) and len(one) == 2:
            rows.append(Row({left: one[0], right: one[1]}, origin))
        else:
            raise UsageError(
                f"{origin}={shortened(one)} is no pair; give ({left}, {right}) or {{'{left}': ..., '{right}':"
                " ...}"
            )
    return rows


def encode_task(single: LoadedModel, table: Table, labels: Sequence[str]) -> list[Example]:
    examples = encode(
        copy.deepcopy(single.tokenizer), single.config, table.left, table.right
    )  # encoding sets its truncation
    if not labels:
        return examples
    numbers = {label: number for number, label in enumerate(labels)}
    return [Example(row.input_ids, numbers[label]) for row, label in zip(examples, table.right, strict=True)]


def leave_out(table: Table, labels: Sequence[str]) -> list[list[int]]:
    """Rows of each fold: the j-th example of every class, for as many as every class has, up to FOLDS; none
    if one has one.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for place, label in enumerate(table.right):
        places[label if labels else ""].append(place)
    least = min(map(len, places.values()))
    if least < 2:
        return []
    return [[rows[fold] for rows in places.values()] for fold in range(min(FOLDS, least))]


def inner_loop(settings: AdaptConfig, single: LoadedModel) -> InnerLoop:
    made = rules.setup(
        single.config, single.worker, single.head_names, single.config.most_classes, settings.bf16
    )
    if settings.own_rates():
        return made.inner
    return replace(made.inner, rates=stored_rates(single.config, made.inner.rates, single.worker))


def choose_steps(
    single: LoadedModel,
    inner: InnerLoop,
    rows: Sequence[Example],
    folds: Sequence[Sequence[int]],
    progress: Progress,
) -> tuple[int, float]:
    """The number of steps (1 or more) with the lowest loss on examples left out, and the accuracy there."""
    worker, theta = single.worker, single.worker.read()
    losses, right = [0.0] * (inner.steps + 1), [0.0] * (inner.steps + 1)
    for done, fold in enumerate(folds):
        progress.line("examples left out", done, len(folds))
        episode = single.deal(
            [row for place, row in enumerate(rows) if place not in fold], [rows[place] for place in fold]
        )
        for step, one in enumerate(
            inner.scores_after_each_step(worker, theta, episode.support, episode.query)
        ):
            losses[step] += one.loss / len(folds) if one.finite else float("inf")
            right[step] += one.accuracy / len(folds)
        worker.write(theta)
    best = min(range(1, inner.steps + 1), key=lambda step: losses[step])
    if not math.isfinite(losses[best]):
        raise UsageError(
            f"inner_lr={single.config.inner_lr}: the loss on examples left out is not finite after any of "
            f"{inner.steps} inner steps; lower --inner_lr"
        )
    return best, right[best]
