"""`fmmeta inspect`: what training would read of data sets, and what it would refuse, before any training.

The loading code is that of a run, and so is its cache of tokens. Where a run would be refused, the data are
read again without the classes, tasks and rows that are refused, so that all of them are listed.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.common.security import printable, redact
from fmmeta.common.text import counted, shortened
from fmmeta.config.conflicts import of_training
from fmmeta.config.fields import refuse_first
from fmmeta.config.settings import Config, ModelConfig, SamplingConfig, TaskConfig
from fmmeta.learners.files import trained_with
from fmmeta.learners.from_gguf import as_folder
from fmmeta.learners.load import describe, fitted_to_model, load_tokenizer, suggest_chat
from fmmeta.tasks.batching import IGNORE, Example
from fmmeta.tasks.data.encode import RowEncoder, make_prompt
from fmmeta.tasks.data.splits import SPLITS
from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.base import (
    ClassSource,
    Draw,
    EpisodeTransform,
    Mixture,
    RowsByClass,
    TaskSource,
    stratum_shares,
    transformed,
)
from fmmeta.tasks.sources.load import FolderSource, Sources, load_sources
from fmmeta.tasks.sources.own import refuse_drawn

DRAWN = 200  # task files of a split that are opened
NOTES, ROWS, EXAMPLES, TOKENS = 12, 5, 5, 60  # notes, rows, examples of an episode and tokens that are shown
CHECKED = 2000  # truncated rows whose full length is counted
LONGER = 64  # times max_length: tokens that are counted of a truncated row


@dataclass
class InspectConfig(ModelConfig, TaskConfig, SamplingConfig):
    """`fmmeta inspect`: the settings of the data and of the model, as a run has them."""


def run(settings: InspectConfig) -> None:
    """Print what a run would read. Raises `UsageError` with the first reason why a run would be refused."""
    config = Config(**asdict(settings))
    if config.learner.ordered:
        raise UsageError(
            f"task_type={config.task_type} has documents and no rows to show; fmmeta train says at its start"
            " which of them it uses"
        )
    refuse_first(of_training(config))
    config = config.but(model_name_or_path=as_folder(config.model_name_or_path, print))
    description = describe(config)
    config = fitted_to_model(config)
    tokenizer = load_tokenizer(config, description, print)
    if config.learner.generates:
        make_prompt(config.prompt_template, tokenizer)
        suggest_chat(config, tokenizer, print)
    sources, notes, refused = read_all(config, tokenizer)
    show_notes([sources.summary, *notes])
    refuse_drawn(sources.train, "fmmeta inspect", "call draw(0) to see the first of them")
    tasks, of_files = dict[str, list[OpenedTask]](), dict[str, None]()
    for split in SPLITS:
        tasks[split], problems = opened(getattr(sources, split), of_files)
        show_notes(problems)
        refused = refused or next((UsageError(text) for text in problems), None)
    if refused and not tasks["train"]:
        raise refused
    show_notes([*of_files])
    progress = Progress(True)
    show_splits(progress, config, tasks)
    stores = {one.store.path: one.store for found in tasks.values() for one in found}
    if not description.images:
        show_lengths(config, tokenizer, list(stores.values()))
    show_rows(progress, tasks["train"][0].store)
    show_episode(config, tokenizer, sources.train, sources.drawn)
    if refused:
        print("\nTraining would be refused:", flush=True)
        raise refused
    print("\nTraining would accept this.")


def read_all(config: Config, tokenizer: Any) -> tuple[Sources, list[str], UsageError | None]:
    """The sources, the loader's notes, and why a run would be refused; if so, the sources without the rows,
    classes and tasks that are refused. Raises `UsageError` if nothing can be read.
    """
    trained, notes = trained_with([config.model_source]), list[str]()
    try:
        return load_sources(config, copy.deepcopy(tokenizer), notes.append, trained), notes, None
    except UsageError as error:
        if config.on_bad_task == "skip":
            raise
        refused, notes = error, []
    skipping = replace(config, on_bad_task="skip", max_bad_fraction=1.0)
    try:
        return load_sources(skipping, copy.deepcopy(tokenizer), notes.append, trained), notes, refused
    except UsageError:  # nothing remains of a split
        smallest = replace(skipping, n_way=2, k_shot=1, num_query=1, n_way_max=None, k_shot_max=None)
        notes.append(
            "shown are the splits for n_way=2, k_shot=1 and num_query=1, as those of this run are empty"
        )
        try:
            return (
                load_sources(smallest, copy.deepcopy(tokenizer), lambda text: None, trained),
                notes,
                refused,
            )
        except UsageError:
            raise refused from None


def show_notes(notes: Sequence[str]) -> None:
    more = len(notes) - NOTES
    lines = [*notes[:NOTES], *([f"and {more} more"] if more > 0 else [])]
    print("\n".join(printable(redact(line)) for line in lines), end="\n" if lines else "")


@dataclass
class OpenedTask:
    """A task, or a set of classes (name ""), of one split. rows: row numbers of `store` by class."""

    name: str
    store: TokenStore
    rows: RowsByClass


def opened(source: TaskSource | None, notes: dict[str, None]) -> tuple[list[OpenedTask], list[str]]:
    """The tasks of a split, of a folder of task files `DRAWN` of them, and the errors of these files.

    notes: gets what the loader says about these files.
    """
    tasks, problems = list[OpenedTask](), list[str]()
    if isinstance(source, Mixture):
        for one in source.sources:
            found, errors = opened(one, notes)
            tasks, problems = tasks + found, problems + errors
    elif isinstance(source, FolderSource):
        for file in source.files[:DRAWN]:
            try:
                found, _ = opened(source.open_task(file, lambda text: notes.update({text: None})), notes)
                tasks += found
            except (UsageError, OSError) as error:
                problems.append(str(error))
    elif isinstance(source, ClassSource):
        tasks = [OpenedTask(name, source.store, rows) for name, rows in source.tasks.items()]
    return tasks, problems


def show_splits(progress: Progress, config: Config, tasks: Mapping[str, Sequence[OpenedTask]]) -> None:
    """A table of tasks, classes and rows by split."""
    classes = config.draws_classes
    table = list[list[str]]()
    for split, found in tasks.items():
        if not found:
            table.append([split, "none: held-out scores are not computed", *[""] * (4 if classes else 3)])
            continue
        sizes = np.array([len(rows) for one in found for rows in one.rows.values()])
        numbers = [f"{sizes.min()} / {np.median(sizes):g} / {sizes.max()}", str(sizes.sum())]
        strata = {one.store.text("stratum", int(rows[0])) for one in found for rows in one.rows.values()}
        if classes:
            ways = [len(one.rows) for one in found]
            of_task = str(ways[0]) if min(ways) == max(ways) else f"{min(ways)} to {max(ways)}"
            numbers = [of_task, *numbers]
        named = str(len(found)) if found[0].name else "sets of classes"
        table.append([split, str(len(strata)), named, *numbers])
    unit = "class" if classes else "task"
    of_classes = ["classes"] if classes else []
    header = ["split", "strata", "tasks", *of_classes, f"rows per {unit}: least / median / most", "rows"]
    ways = f" of {config.n_way} classes" if classes else ""
    title = (
        f"episodes{ways}: {config.k_shot} support and {config.num_query} query rows per {unit}, so"
        f" {config.k_shot + config.num_query} rows at least"
        f"{'; the name of each class is a support row too' if config.label_names else ''}"
    )
    progress.table(title, header, table)
    files = max(map(len, tasks.values()))
    if files == DRAWN:
        print(f"(the first {DRAWN} task files of each split)")


def show_lengths(config: Config, tokenizer: Any, stores: Sequence[TokenStore]) -> None:
    """Tokens of a row, and how many rows are truncated."""
    lengths = np.concatenate([store.lengths()[: len(store)] for store in stores])
    half, most = np.percentile(lengths, [50, 95])
    print(
        f"\nlengths in tokens: least {lengths.min()}, median {half:g}, 95 % up to {most:g}, most"
        f" {lengths.max()} (max_length {config.max_length})"
    )
    full, cut, answers = 0, 0, 0
    longer = replace(config, max_length=LONGER * config.max_length)
    for store in stores:
        rows = [int(row) for row in np.flatnonzero(store.lengths()[: len(store)] >= config.max_length)]
        full += len(rows)
        rows = rows[:CHECKED]
        whole = RowEncoder(longer, tokenizer).examples([store.value(row) for row in rows], {}) if rows else []
        for row, example in zip(rows, whole, strict=True):
            if len(example.input_ids) > config.max_length:
                cut += 1
                answers += config.learner.generates and learned(example.labels) > learned(store.labels(row))
    if cut:
        of_those = f" of the first {CHECKED}" if full > CHECKED else ""
        print(
            f"{counted(cut, 'text')}{of_those} of {counted(len(lengths), 'row')} "
            f"{'is' if cut == 1 else 'are'} truncated; raise --max_length to keep them whole"
        )
    if answers:
        print(f"{counted(answers, 'answer')} of these {'loses its' if answers == 1 else 'lose their'} end")


def learned(labels: Any) -> int:
    """Number of tokens that count in the loss."""
    return sum(label != IGNORE for label in labels)


def show_rows(progress: Progress, store: TokenStore) -> None:
    """A few rows as they were read."""
    chosen = sorted({int(row) for row in np.linspace(0, len(store) - 1, ROWS)})
    lengths = store.lengths()
    source = "input" if store.kind.pair else "values"  # what a learner has stored of a row
    rows = [
        [
            f"{row}",
            *(shortened(store.text(column, row)) for column in ("stratum", "task", source, "target")),
            str(lengths[row]),
        ]
        for row in chosen
    ]
    progress.table("rows", ["row", "stratum", "task", "input", "target", "tokens"], rows)


def show_episode(
    config: Config, tokenizer: Any, source: TaskSource, drawn: Sequence[EpisodeTransform]
) -> None:
    """The first episode of training: the tokens of its rows with their label, or with the loss mask."""
    try:
        shares, count = stratum_shares(config, source.items), config.tasks_per_step
        schedule = Schedule(source.items, count, config.seed, shares=shares, sizes=source.size)
        task = schedule.meta_batch(0)[0]
        rows = transformed(source.draw(task), [*drawn, Draw.episode])
    except (UsageError, OSError) as error:
        show_notes([f"no episode: {error}"])
        return
    kind = "classes" if config.learner.of_classes else "labels"
    mask = "" if config.learner.of_classes else "; [tokens] in brackets count in the loss"
    classes = f", {kind} {', '.join(rows.classes)}" if rows.classes else ""
    print("\n" + printable(f"one episode: task {task.name!r}, stratum {task.stratum!r}{classes}{mask}"))
    for name, examples in (("support", rows.support), ("query", rows.query)):
        shown = examples[:: max(1, len(examples) // EXAMPLES)][:EXAMPLES]
        of_them = f", {len(shown)} of them" if len(shown) < len(examples) else ""
        print(f"{name}: {counted(len(examples), 'row')}{of_them}")
        for example in shown:
            label = f"{rows.classes[example.labels]}: " if isinstance(example.labels, int) else ""
            print("  " + printable(label + (inputs_of(example) or as_tokens(tokenizer, example))))


def inputs_of(example: Example) -> str:
    """The shapes of the inputs that are no tokens; "" without any."""
    shapes = {name: list(getattr(value, "shape", ())) for name, value in example.values.items()}
    return ", ".join(f"{name} {shape}" if shape else name for name, shape in shapes.items())


def as_tokens(tokenizer: Any, example: Example) -> str:
    """The tokens of an example, separated by |; those that count in the loss in brackets."""
    labels, unmarked = example.labels, [IGNORE] * len(example.input_ids)
    if not isinstance(labels, list) or len(labels) != len(unmarked):  # of the row, not of its tokens
        labels = unmarked
    words = [tokenizer.decode([token]).replace("\n", "\\n") for token in example.input_ids]
    words = [
        f"{word}|" if label == IGNORE else f"[{word}]" for word, label in zip(words, labels, strict=True)
    ]
    if len(words) > TOKENS:
        words[TOKENS // 2 : -TOKENS // 2] = [f" ... {counted(len(words) - TOKENS, 'token')} ... "]
    return "".join(words)
