"""`fmmeta adapt`: from a handful of labelled examples to a model of their task, an ordinary Hugging Face folder.

    support file --> inner steps chosen by leaving examples out --> inner loop on all of them --> folder, card, predictions

The inner loop is the one of meta-training, from the model's own memory (fmmeta.json) where nothing else is said. One process.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fmmeta.config import Config, UsageError
from fmmeta.export import export
from fmmeta.fewshot.card import write_card
from fmmeta.fewshot.defaults import stored_rates
from fmmeta.fewshot.predict import Answer, answer
from fmmeta.fewshot.settings import AdaptConfig
from fmmeta.fewshot.single import Single, start
from fmmeta.meta.algorithms import setup as rules
from fmmeta.meta.inner import InnerLoop
from fmmeta.progress import Progress
from fmmeta.tasks.batch import Example
from fmmeta.tasks.encode import encode
from fmmeta.tasks.rows import read_file
from fmmeta.tasks.table import Table, tabulate

FOLDS = 5  # most examples of a class that are left out in turn


@dataclass(frozen=True)
class Adapted:
    """What `adapt` gives. Accuracies between 0 and 1; `left_out`: of the examples left out, None if none could be."""

    folder: Path
    labels: tuple[str, ...]
    inner_steps: int
    left_out: float | None
    accuracy: float | None
    predictions: list[Answer]
    single: Single

    def predict(self, texts: Sequence[str], max_new_tokens: int = 64) -> list[Answer]:
        """Answers to new inputs."""
        return answer(self.single, texts, max_new_tokens)


def run(settings: AdaptConfig) -> None:
    """`fmmeta adapt`: adapt and tell."""
    progress = Progress(speaks=True)
    adapted = adapt(settings, progress)
    if adapted.accuracy is not None:
        progress.notice(f"accuracy on {settings.query}: {100 * adapted.accuracy:.1f} % of {len(adapted.predictions)}; answers in "
                        f"{adapted.folder / 'predictions.jsonl'}")  # fmt: skip
    progress.notice(f"model {adapted.folder}")


def adapt(settings: AdaptConfig, progress: Progress) -> Adapted:
    """Learn the task of `settings.support`. Raises `UsageError`."""
    config = settings.run_config(n_way=2)
    support = read_task(settings.support, config, progress.notice)
    labels = tuple(sorted(set(support.right))) if config.task_type == "classification" else ()
    if len(labels) == 1:
        raise UsageError(f"support={settings.support} has one class only, {labels[0]!r}; give examples of two or more")
    folder = make_folder(settings.output_dir)
    config = settings.run_config(n_way=len(labels) or 2)
    chooses = settings.early_stopping and config.inner_lr_schedule == "constant" and config.inner_steps > 0
    folds = leave_out(support, labels) if chooses else []
    steps = config.inner_steps * 2 if folds else config.inner_steps
    config = replace(config, inner_steps=steps)
    single = start(config, progress, labels, settings.bf16)
    rows = encode_task(single, config, support, labels)
    inner = inner_loop(settings, single)
    left_out = None
    if folds:
        steps, left_out = choose_steps(single, inner, rows, folds, progress)
        progress.notice(f"{steps} inner steps: {100 * left_out:.1f} % right of examples that were left out, of up to "
                        f"{config.inner_steps} steps")  # fmt: skip
    inner = replace(inner, steps=steps)
    theta = single.worker.read()
    adaptation = inner.adapt(single.worker, theta, single.dealer.deal(rows))
    if not all(one.finite for one in adaptation.passes):
        raise UsageError(f"inner_lr={config.inner_lr}: the loss on {settings.support} is not finite after {steps} inner steps; "
                         "lower --inner_lr")  # fmt: skip
    learned = replace(config, head_init="learned", inner_steps=max(1, steps))
    export(
        folder, single.worker.read(), single.worker, single.frozen, learned, single.description, single.tokenizer, single.ranks
    )
    accuracy, predictions = test(settings, single, labels, progress.notice)
    adapted = Adapted(folder, labels, steps, left_out, accuracy, predictions, single)
    write_card(adapted, settings, support)
    if predictions:
        lines = "".join(json.dumps(one.as_dict(), ensure_ascii=False) + "\n" for one in predictions)
        (folder / "predictions.jsonl").write_text(lines, encoding="utf-8")
    return adapted


def make_folder(output_dir: str) -> Path:
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"output_dir={folder} is not empty; choose another, so that nothing is overwritten")
    except OSError as error:
        raise UsageError(f"output_dir={folder} cannot be made: {error.strerror}; choose another") from None
    return folder


def read_task(path: str, config: Config, notice: Callable[[str], None]) -> Table:
    """The rows of a file as one task. Raises `UsageError`."""
    return tabulate(path, read_file(Path(path)), config, notice, one_task=True)


def encode_task(single: Single, config: Config, table: Table, labels: Sequence[str]) -> list[Example]:
    examples = encode(single.tokenizer, config, table.left, table.right)
    if not labels:
        return examples
    numbers = {label: number for number, label in enumerate(labels)}
    return [Example(row.input_ids, numbers[label]) for row, label in zip(examples, table.right, strict=True)]


def leave_out(table: Table, labels: Sequence[str]) -> list[list[int]]:
    """Rows of each fold: the j-th example of every class, for as many as every class has, up to FOLDS; none if one has one."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, label in enumerate(table.right):
        places[label if labels else ""].append(place)
    least = min(map(len, places.values()))
    if least < 2:
        return []
    return [[rows[fold] for rows in places.values()] for fold in range(min(FOLDS, least))]


def inner_loop(settings: AdaptConfig, single: Single) -> InnerLoop:
    made = rules.setup(single.config, single.worker, single.head_names, single.config.most_classes, settings.bf16)
    if settings.own_rates():
        return made.inner
    return replace(made.inner, rates=stored_rates(single.config, made.inner.rates, single.worker))


def choose_steps(single: Single, inner: InnerLoop, rows: Sequence[Example], folds: Sequence[Sequence[int]],
                 progress: Progress) -> tuple[int, float]:  # fmt: skip
    """The number of steps (1 or more) with the lowest loss on examples left out, and the accuracy there."""
    worker, theta = single.worker, single.worker.read()
    losses, right = [0.0] * (inner.steps + 1), [0.0] * (inner.steps + 1)
    for done, fold in enumerate(folds):
        progress.line("examples left out", done, len(folds))
        episode = single.deal([row for place, row in enumerate(rows) if place not in fold], [rows[place] for place in fold])
        for step, one in enumerate(inner.path(worker, theta, episode.support, episode.query)):
            losses[step] += one.loss / len(folds) if one.finite else float("inf")
            right[step] += one.accuracy / len(folds)
        worker.write(theta)
    best = min(range(1, inner.steps + 1), key=lambda step: losses[step])
    return best, right[best]


def test(settings: AdaptConfig, single: Single, labels: Sequence[str],
         notice: Callable[[str], None]) -> tuple[float | None, list[Answer]]:  # fmt: skip
    """Accuracy on the query file, and the answers."""
    if settings.query is None:
        return None, []
    query = read_task(settings.query, single.config, notice)
    unknown = sorted(set(query.right) - set(labels)) if labels else []
    if unknown:
        raise UsageError(
            f"query={settings.query} has the class {unknown[0]!r}, of which {settings.support} has no example; add some"
        )
    answers = answer(single, query.left, settings.max_new_tokens)
    answers = [replace(one, truth=truth) for one, truth in zip(answers, query.right, strict=True)]
    return sum(one.output == one.truth for one in answers) / len(answers), answers
