"""Learns tasks from their support sets: the number of steps by cross-validation, then the inner loop.

    support sets --> folds --> passes of several tasks --> loss on examples left out --> steps of each task
                 --> passes of several tasks --> adapters and head of each task

With LoRA a pass has the rows of as many tasks as `tokens_per_pass` and the memory allow (meta/multi_task.py);
other models learn one task at a time (meta/inner_loop.py). Both give a task the same weights up to rounding.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmmeta.adaptation.model import load_model
from fmmeta.common.errors import UsageError
from fmmeta.common.processes import host_bytes
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.text import counted
from fmmeta.config.settings import Config
from fmmeta.evaluation.methods import with_stored_rates
from fmmeta.evaluation.settings import AdaptConfig, has_inner_loop, has_prompts
from fmmeta.learners.files import remembered, trained_with
from fmmeta.learners.load import suggest_chat
from fmmeta.learners.task_axis import TaskAxis
from fmmeta.meta.algorithms import setup as rules
from fmmeta.meta.algorithms.baselines import prompts
from fmmeta.meta.inner_optimizers import RATES_FILE
from fmmeta.meta.multi_task import MultiTaskInnerLoop
from fmmeta.parallel.layout import size_of
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.workers.base import PassStats, all_finite
from fmmeta.reliability.checks import rising_loss
from fmmeta.tasks.augment import sample_support
from fmmeta.tasks.batching import Episode, Example, batches_of_step
from fmmeta.tasks.data.columns import Row, refuse
from fmmeta.tasks.data.encode import RowEncoder, answer_without_room, full_rows
from fmmeta.tasks.data.files import is_document, read_file
from fmmeta.tasks.data.rows import Examples, Table, label_texts, rows_in_memory, tabulate
from fmmeta.tasks.data.splits import few, known_rows
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import EpisodeRows, EpisodeTransform, transformed
from fmmeta.tasks.sources.stream import chunked, document_of, read_texts

FOLDS = 2  # at most; each costs an inner loop
MEMORY = 0.5  # share of the free memory that the adapters of a pass may take
ROUND = 4  # passes whose tasks are learned together, so that those with as many steps share a pass


@dataclass(frozen=True)
class TaskExamples:
    """The examples of a task. name: None for the only task of a command. labels: names of its classes,
    sorted, or of what a learner's labels are; none for causal_lm. facts: of the examples (`Learner.facts`),
    without these names.
    """

    name: str | None
    table: Table
    labels: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def read_task(
    setting: str,
    source: str | Examples | None,
    config: Config,
    notice: Callable[[str], None],
    task: str | None = None,
    tokenizer: Any = None,
) -> Table:
    """The rows of a file, or examples, as one task; no rows without a source.

    task: its name, for messages. tokenizer: an `ImageReader` for images. Duplicates in the support set are
    dropped. Logs rows that the model was trained on in classes of other names. Raises `UsageError`.
    """
    if source is None:
        return Table()
    name = source if isinstance(source, str) else task or setting
    if isinstance(source, str) and is_document(Path(source)):
        if not config.learner.ordered:
            raise UsageError(f"{setting}={name} is a document, which only task_type=stream reads; give rows")
        (row,) = read_texts(Path(source), [Path(source)], refuse)
        rows = [Row({"text": row.values["text"]}, row.origin)]
    else:
        rows = read_file(Path(name)) if isinstance(source, str) else rows_in_memory(source, config, name)
    if config.learner.ordered:
        parts = {document_of(config, row) or row.origin for row in rows}
        what = "a document has no answers" if setting == "query" else f"it has {len(parts)} documents"
        if setting == "query" or len(parts) > 1:
            raise UsageError(
                f"{setting}={name}: {what}, and one is learned; give a file of one as --support, or its parts"
                " with its name in a column `document`"
            )
    table = tabulate(
        name,
        rows,
        config,
        lambda text: notice(f"{name}: {text}"),
        one_task=True,
        unique=setting == "support" and not config.learner.ordered,
        tokenizer=tokenizer,
        setting=setting,
    )
    for text in known_rows(trained_with([config.model_source]), name, "class", table.contents):
        notice(Warn(text))
    return table


def support_set(
    name: str | None,
    table: Table,
    settings: AdaptConfig,
    config: Config,
    notice: Callable[[str], None],
) -> TaskExamples:
    """The task of these examples. name: None for the task of `settings.support`.

    Logs classes that the model was trained on. Raises `UsageError` for a single class.
    """
    source, kind = name or settings.support, config.learner.kind
    facts = {**kind.facts(table.rows(kind))}
    labels = tuple(facts.pop("names", ()))
    if not config.learner.of_classes:
        return TaskExamples(name, table, labels, facts)
    if len(labels) == 1:
        given = f"support={source}" if source else "support"
        raise UsageError(f"{given} has one class only, {labels[0]!r}; give examples of two or more")
    for one in trained_with([settings.model_source]):
        if shared := sorted(one.trained_names("class") & set(labels)):
            notice(
                Warn(
                    f"{source or 'support'}: {len(shared)} of {len(labels)} classes ({few(shared)})"
                    f" have names of classes that the model was trained on with dataset={one.dataset}; its"
                    " accuracy on them is not that on new classes"
                )
            )
    return TaskExamples(name, table, labels, facts)


def leave_out(table: Table, labels: Sequence[str]) -> list[list[int]]:
    """Indices of the rows of each fold: the j-th example of every class; none if a class has one example.
    Rows without a class are of one.
    """
    by_class: dict[str, list[int]] = defaultdict(list)
    for index, label in enumerate(table.target):
        by_class[label if labels else ""].append(index)
    fewest = min(map(len, by_class.values()))
    folds = min(FOLDS, fewest) if fewest > 1 else 0
    return [[rows[fold] for rows in by_class.values()] for fold in range(folds)]


@dataclass(frozen=True)
class Encoded:
    """A task as tokens, and what came of it.

    folds: indices of the examples that are left out in turn. steps: that it takes. left_out: accuracy on
    those examples, None without them. weights: complete trained parameters by name, with LoRA; without it
    the worker holds them until the next task. failure: why the task was not learned.
    """

    task: TaskExamples
    examples: list[Example]
    steps: int
    folds: list[list[int]] = field(default_factory=list)
    left_out: float | None = None
    weights: dict[str, Tensor] | None = None
    failure: str = ""


class TaskLearner:
    """A model and the inner loop of `settings` for tasks of up to `classes` classes (0: causal_lm).

    labels: of all tasks, where the head of the model is the one learned for them. ranks: groups of a launch
    (default: this process alone). Raises `UsageError`. Collective: world.
    """

    def __init__(
        self,
        settings: AdaptConfig,
        classes: int,
        progress: Progress,
        labels: Sequence[str] = (),
        ranks: ProcessGroups | None = None,
    ) -> None:
        self.settings, self.progress = settings, progress
        self.config = config = settings.run_config(labels=labels, n_way=classes or 2)
        self.method = method = settings.method_of(config)
        if message := settings.unusable_head(config, labels):
            progress.notice(Warn(message))
        self.model = model = load_model(config, progress, labels, ranks)
        suggest_chat(config, model.tokenizer, progress.notice)
        self.tokenizer = copy.deepcopy(model.tokenizer)  # encoding sets its truncation
        self.prompts, learns = has_prompts(method), has_inner_loop(method)
        self.learns_prompts = self.prompts and learns
        # early stopping tries up to twice as many steps
        samples = partial(sample_support, config.support_batch_size, 2 * config.inner_steps)
        self.transforms: list[EpisodeTransform] = [samples]
        self.steps = config.inner_steps if learns else 0
        # a document has an order, and no rows to leave out
        self.chooses = settings.early_stopping and self.steps > 0 and not config.learner.ordered
        if self.learns_prompts:  # rows of all examples: of many, a few fill a pass
            self.transforms[:0] = prompts(method, model.tokenizer, model.description.hf_config)
            model.batcher = replace(model.batcher, max_tokens=settings.tokens_per_pass)
        longest = replace(config, inner_steps=config.inner_steps * (2 if self.chooses else 1))
        setup = rules.setup(longest, model.worker, model.head_names, config.most_classes, settings.bf16)
        self.inner = with_stored_rates(settings, longest, setup.inner, model.worker)
        if learns:
            rules.refuse_still_head(config, self.inner, model.worker)
        self.theta = model.worker.read()
        self.written: Path | None = None  # the folder of the last task that was written
        self.loop: MultiTaskInnerLoop | None = None
        in_turn = config.compile or config.support_batch_size or config.learner.ordered
        if config.lora_r and not (in_turn or self.inner.changes_head_only):
            with suppress(UsageError):  # other layers than linear ones are trained: a task at a time
                self.loop = MultiTaskInnerLoop(self.inner, TaskAxis(model.worker.learner))
        has_rates = "inner_rates" in remembered(settings.model_source)
        # for an exported folder, where they are those of the model
        self.rates_to_store = rates = self.inner.rates if has_rates and not settings.sets_inner_lr else None
        self.element_rates: dict[str, Tensor] = {}  # by parameter, where the model stores such rates
        if config.lora_r and rates is not None and rates.element is not None:
            self.element_rates = self._by_name(rates.scale_layers(0, rates.element.clone()))
        self.most_tasks = self._tasks_in_memory() if self.loop else 1

    def hold(self, weights: dict[str, Tensor]) -> None:
        """Write a task's weights into the worker. Collective: group."""
        vector = self.theta.clone()
        for name, value in weights.items():
            self.model.worker.params.put(vector, name, value)
        self.model.worker.write(vector)

    def encode(self, task: TaskExamples) -> Encoded:
        """The examples as tokens; classes by their index in the labels."""
        name, kind = task.name or self.settings.support or "support", self.config.learner.kind
        if message := answer_without_room(self.config, self.tokenizer, task.table.target):
            raise UsageError(f"support={task.name or self.settings.support or 'pairs'}: {message}")
        facts, encode = {**task.facts, "names": task.labels}, RowEncoder(self.config, self.tokenizer).examples
        examples = encode(task.table.rows(kind), facts)
        if self.config.learner.ordered:  # the rows are parts of one document
            ids = [token for one in examples for token in one.input_ids]
            if len(ids) < 2:
                raise UsageError(f"{name} has {counted(len(ids), 'token')}; give a longer document")
            examples = chunked(ids, self.config, 0, len(ids))
            return Encoded(task, examples, len(examples))
        if message := full_rows(self.config, [len(one.input_ids) for one in examples]):
            self.progress.notice(Warn(f"{name}: {message}"))
        if names := label_texts(self.config, task.labels):  # after the others: no fold leaves them out
            examples += encode([{"text": text, "label": label} for label, text in names.items()], facts)
        if self.prompts and (message := self.model.dropped_examples(examples, self.settings.max_new_tokens)):
            self.progress.notice(Warn(f"{name}: {message}"))
        folds = leave_out(task.table, task.labels) if self.chooses else []
        return Encoded(task, examples, self.steps, folds)

    def rounds(self, tasks: Iterable[Encoded]) -> list[list[Encoded]]:
        """Tasks of similar sizes, the largest first, as many as fit into a few passes."""
        tasks = list(tasks)
        passes = self._passes([one.examples for one in tasks], ROUND if self.loop else 1)
        return [[tasks[number] for number in numbers] for numbers in passes]

    def follow(self, document: Encoded) -> list[list[PassStats]]:
        """A pass over each chunk of a document: at theta, and by the inner loop before its step. The worker
        holds phi_K afterwards. Collective: group.
        """
        loop: Any = replace(self.inner, steps=document.steps)  # an OnlineLoop
        worker = self.model.worker
        episode = self._episode(document, document.examples, [])
        worker.write(self.theta)
        return [loop.scores_by_chunk(worker, self.theta, episode, learns) for learns in (False, True)]

    def learn(self, tasks: Sequence[Encoded]) -> Iterator[Encoded]:
        """Learn tasks, in any order. The worker holds theta afterwards, or the weights of the last task.

        Collective: group.
        """
        self.model.worker.write(self.theta)
        chosen = [*self._choose_steps(tasks)]
        yield from (one for one in chosen if one.failure)
        for one, passes in self._adapt([one for one in chosen if not one.failure]):
            *steps, last = passes
            if not (all_finite(steps) and math.isfinite(last.loss)):
                failure = (
                    f"inner_lr={self.config.inner_lr}: the loss on the support set is not finite after"
                    f" {counted(one.steps, 'inner step')}; lower --inner_lr"
                )
                one = replace(one, failure=failure)
            elif self.config.learner.ordered:
                loss = PassStats.mean(steps or [last]).loss
                self.progress.notice(
                    f"{one.task.name or 'document'}: loss {passes[0].loss:.3g} of the first chunk,"
                    f" {loss:.3g} of {counted(one.steps, 'chunk')}, each before its step"
                )
                if warning := rising_loss(self.config, passes[0].loss, loss, one.steps):
                    self.progress.notice(Warn(warning))
            elif has_inner_loop(self.method):
                self._log_support(one, passes[0], last)
            yield one

    def _log_support(self, one: Encoded, before: PassStats, after: PassStats) -> None:
        """Log what the model of a task makes of its examples, and warn where it has not learned them.

        before, after: passes over the rows of the first inner step.
        """
        right = f"{int(after.numbers[1])} of {int(after.numbers[2])} right"
        scored = f"; {right}" if after.numbers[2] else ""
        if not one.task.name:
            loss = f"{after.loss:.3g}"
            if one.steps:
                loss = f"{before.loss:.3g} before, {loss} after {counted(one.steps, 'inner step')}"
            self.progress.notice(f"support set: loss {loss}{scored}")
        warning = rising_loss(self.config, before.loss, after.loss, one.steps)
        chance = 1 / len(one.task.labels) if one.task.labels else 0.0
        fell = one.steps > 0 and after.loss < before.loss / 2
        if not warning and after.accuracy < (1 + chance) / 2 and not fell:  # halfway from chance to all
            more = f"more --inner_steps than {one.steps}, or another --inner_lr than {self.config.inner_lr:g}"
            warning = f"the examples were not learned: {right} after the inner loop; try {more}"
        if warning:
            self.progress.notice(Warn(f"{one.task.name}: {warning}" if one.task.name else warning))
        if one.left_out is not None and not one.task.name:
            self.progress.notice(
                f"{counted(one.steps, 'inner step')}: {100 * one.left_out:.1f} % right of examples that were"
                f" left out, of up to {self.inner.steps} steps"
            )

    def _choose_steps(self, tasks: Sequence[Encoded]) -> Iterator[Encoded]:
        """Each task with the number of steps (1 or more) that has the lowest loss on examples left out, and
        the accuracy there; or its failure, if no loss is finite.
        """
        owners = [number for number, one in enumerate(tasks) for _ in one.folds]
        episodes = [fold for one in tasks for fold in self._folds(one)]
        scores: dict[int, list[Tensor]] = defaultdict(list)
        for place, score in self._scores([tasks[number] for number in owners], episodes):
            scores[owners[place]].append(score)
        for number, one in enumerate(tasks):
            if one.folds:
                loss, accuracy = torch.stack(scores[number]).mean(0).tolist()
                best = min(range(1, self.inner.steps + 1), key=lambda step: loss[step])
                left_out = None if math.isnan(accuracy[best]) else accuracy[best]
                one = replace(one, steps=best, left_out=left_out)
                if not math.isfinite(loss[best]):
                    failure = (
                        f"inner_lr={self.config.inner_lr}: the loss on examples left out is not finite after"
                        f" any of {self.inner.steps} inner steps; lower --inner_lr"
                    )
                    one = replace(one, failure=failure)
            yield one

    def _folds(self, one: Encoded) -> Iterator[tuple[list[Example], list[Example]]]:
        """Support and query examples of each fold."""
        for fold in one.folds:
            support = [example for index, example in enumerate(one.examples) if index not in fold]
            yield support, [one.examples[index] for index in fold]

    def _episode(self, one: Encoded, support: list[Example], query: list[Example]) -> Episode:
        """The micro-batches of the inner loop and of the queries."""
        task = Task(0, one.task.name or "", "", 0, (self.config.seed,))
        in_order = tuple([row] for row in support) if self.config.learner.ordered else ()
        rows = EpisodeRows(task, support, query, one.task.labels, in_order)
        return self.model.batcher.episode(transformed(rows, self.transforms))

    def _scores(
        self, owners: Sequence[Encoded], folds: Sequence[tuple[list[Example], list[Example]]]
    ) -> Iterator[tuple[int, Tensor]]:
        """The number of each fold, with its scores after 0 to K steps [2, K + 1]."""
        worker = self.model.worker
        for numbers in self._passes([support for support, _ in folds]):
            episodes = [self._episode(owners[number], *folds[number]) for number in numbers]
            if self.loop is None:  # one fold
                passes = [self.inner.scores_after_each_step(worker, self.theta, episodes[0])]
                worker.write(self.theta)
            else:
                passes = self.loop.scores_after_each_step(worker, self.theta, episodes)
            yield from zip(numbers, map(as_scores, passes), strict=True)

    def _adapt(self, tasks: Sequence[Encoded]) -> Iterator[tuple[Encoded, list[PassStats]]]:
        """Each task with its weights, and the statistics of the rows of each of its K steps and of the first
        step's rows after all steps.
        """
        worker, tasks = self.model.worker, sorted(tasks, key=lambda one: one.steps)
        for numbers in self._passes([one.examples for one in tasks], in_order=True):
            here = [tasks[number] for number in numbers]
            sets = [self._episode(one, one.examples, []).support for one in here]
            steps = [one.steps for one in here]
            if self.loop is None:  # one task
                worker.write(self.theta)
                passes = replace(self.inner, steps=steps[0]).adapt(worker, self.theta, sets[0]).passes
                passes.append(worker.forward(batches_of_step(sets[0], 0)))
                results = [(passes, self._by_name(worker.read()) if self.config.lora_r else None)]
            else:
                results = self.loop.adapt(worker, self.theta, sets, steps)
            for one, (passes, named) in zip(here, results, strict=True):
                yield replace(one, weights=named and self._own_classes(one, named)), passes

    def _own_classes(self, one: Encoded, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights with a head of the task's own classes alone."""
        rows = len(one.task.labels)
        return {
            name: value[:rows] if rows and name in self.inner.head.names else value
            for name, value in weights.items()
        }

    def _by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """The complete parameters of a vector. Collective: group."""
        return {
            name: value.cpu().clone() for name, value in self.model.worker.complete_params(vector).items()
        }

    def _passes(
        self, sets: Sequence[Sequence[Example]], times: int = 1, in_order: bool = False
    ) -> list[list[int]]:
        """Numbers of the sets of each pass, by size unless they are `in_order`. The same on every rank.

        times: passes that count as one.
        """
        batcher, passes = self.model.batcher, list[list[int]]()
        most, tokens = times * self.most_tasks, times * self.settings.tokens_per_pass
        sizes = [
            (min(batcher.micro_batch_size, -(-len(rows) // batcher.group_size)), self._longest(rows))
            for rows in sets
        ]
        order = range(len(sets))
        for number in order if in_order else sorted(order, key=sizes.__getitem__, reverse=True):
            together = [*passes[-1], number] if passes else [number]
            rows, longest = (max(sizes[one][part] for one in together) for part in (0, 1))
            fits = len(together) <= most and len(together) * rows * longest <= tokens
            if passes and self.loop and fits:
                passes[-1] = together
            else:
                passes.append([number])
        return passes

    def _longest(self, examples: Sequence[Example]) -> int:
        """Tokens of the longest row of the inner loop on some examples."""
        lengths = [len(example.input_ids) for example in examples]
        if not self.learns_prompts:
            return max(lengths)
        return min(sum(lengths), self.model.positions or sum(lengths))

    def _tasks_in_memory(self) -> int:
        """The largest number of tasks whose adapters fit into the free memory of every rank.

        Raises `UsageError` if one does not. Collective: world, since all groups cut the same rounds.
        """
        worker, ranks = self.model.worker, self.model.ranks
        copies = 5 + len(self.inner.optimizer.state_names)  # phi, gradient, update, sums, copy of the result
        of_task = 4 * copies * sum(torch.Size(shape).numel() for shape in worker.trained_shapes.values())
        free = host_bytes(ranks.layout.launch.local_world_size)
        if worker.device.type == "cuda":
            free = min(free, torch.cuda.mem_get_info(worker.device)[0])
        free = min(ranks.world.gather(free))
        if of_task > free:
            raise UsageError(
                f"lora_r={self.config.lora_r}: the adapters of one task take {size_of(of_task)} with"
                f" gradients and the inner optimizer, and {size_of(free)} are free; lower --lora_r, or adapt"
                " fewer layers (--lora_target_modules)"
            )
        return max(1, int(MEMORY * free / of_task))


def head_key(settings: AdaptConfig, labels: Sequence[str]) -> tuple[int, bool]:
    """Tasks of equal keys can share a model: 0 for every number of classes, or the number of `labels` where
    the head or the rates are stored for it, or where the whole model is written; whether the head is learned.
    """
    config = settings.run_config(labels=labels, n_way=len(labels) or 2)
    exact = remembered(settings.model_source).get("inner_rates") == RATES_FILE
    learned = config.head_init == "learned"
    return len(labels) if exact or not config.lora_r or learned else 0, learned


def as_scores(passes: Sequence[PassStats]) -> Tensor:
    """Loss (inf if not finite) and accuracy of P passes, float64 [2, P]."""
    return torch.tensor(
        [[one.loss if one.finite else math.inf for one in passes], [one.accuracy for one in passes]],
        dtype=torch.float64,
    )
