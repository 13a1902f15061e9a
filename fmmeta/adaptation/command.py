"""`fmmeta adapt`: learns tasks from a few labelled examples, and writes a Hugging Face folder for each.

    support files --> tasks without a complete folder --> rounds of tasks of similar sizes, over all groups
                  --> a folder per task: written under a temporary name, renamed when it is complete

A support file is a list of one task, without a name: `output_dir` is its folder, one process learns it, and
its model stays in memory. Of a directory, every group takes each num_groups-th round, and the ranks of a
group share the rows of a task. Its folders are the state of the command: the same command again skips
complete ones and learns the others. A task that fails is logged and skipped.
"""

import json
import os
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fmmeta.adaptation import model
from fmmeta.adaptation.folder import (
    ChangedSettings,
    is_complete,
    partial_folder,
    refuse_files,
    remove_partial,
    write_task,
)
from fmmeta.adaptation.model import AdaptedModel, with_labels
from fmmeta.adaptation.task_learner import (
    Encoded,
    TaskExamples,
    TaskLearner,
    head_key,
    read_task,
    support_set,
)
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.security import inside, printable
from fmmeta.common.text import counted, shortened
from fmmeta.config.fields import refuse_first
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import AdaptConfig, PredictConfig
from fmmeta.learners.load import describe, load_tokenizer
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import ProcessGroups, World, pick_device
from fmmeta.tasks.data.files import ENDINGS, ending, files_of, is_document, stem
from fmmeta.tasks.data.images import EncodedImage
from fmmeta.tasks.data.rows import Examples, Table, prefixed
from fmmeta.tasks.data.splits import few
from fmmeta.tasks.sources.stream import text_files, texts_beside_rows
from fmmeta.training.build import local_model
from fmmeta.training.run_files import lock_folder

LONGEST = 200  # bytes of a task's name; file systems take 255

Sources = Sequence[tuple[str | None, str | Examples]]
"""Name of each task, None for the only one, and its file or examples."""
Found = tuple[list[TaskExamples], list[str], dict[str, str]]
"""Tasks to learn, names of those with a complete folder, and why others cannot be learned, by name."""


class AdaptedModels(Mapping[str, AdaptedModel]):
    """Adapted models by the names of their tasks; each is loaded from its folder when it is accessed.

    output_dir: the folder of the folders. failed: why tasks were not learned, by name; accessing one of them
    raises `UsageError`.
    """

    def __init__(
        self, output_dir: Path, names: list[str], failed: Mapping[str, str], settings: Mapping[str, Any]
    ) -> None:
        self.output_dir, self.failed = output_dir, dict(failed)
        self._names, self._settings = dict.fromkeys(sorted(names)), settings

    def __getitem__(self, name: str) -> AdaptedModel:
        if name in self.failed:
            raise UsageError(f"task {name} was not learned: {self.failed[name]}")
        if name not in self._names:
            raise KeyError(name)
        return model.load(PredictConfig(model_name_or_path=str(self.output_dir / name), **self._settings))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        kind, counts = type(self).__name__, f"{len(self)} tasks, {len(self.failed)} failed"
        return f"{kind}(output_dir={str(self.output_dir)!r}, {counts})"


def run(settings: AdaptConfig) -> None:
    """`fmmeta adapt`. Raises `UsageError`, with the number of failed tasks of a directory at the end.

    Collective: world.
    """
    launch, support = Launch.from_env(os.environ), settings.support
    refuse_first(
        [
            *(
                (not getattr(settings, name), f"{name} is missing; give --{name}")
                for name in ("support", "output_dir")
            ),
            (
                launch.world_size > 1 and not Path(support).is_dir(),
                f"support={support} is one task, which one process adapts to, and {launch.world_size} were"
                " started; start one, or give a directory of support files",
            ),
        ]
    )
    progress = Progress(enabled=launch.global_rank == 0)
    if Path(support).is_dir():
        models = adapt_many(settings, progress)
        if names := [shortened(name) for name in sorted(models.failed)]:
            raise UsageError(
                f"support={support}: {len(names)} of {len(models) + len(names)} tasks failed ({few(names)}),"
                f" each with a line above; the other {len(models)} are in {settings.output_dir}: fix the"
                " failed ones, and run the same command again"
            )
    else:
        adapted = adapt(settings, progress)
        if adapted.predictions:
            progress.notice(
                f"{scores_text(adapted, str(settings.query))};"
                f" answers in {Path(str(settings.output_dir), 'predictions.jsonl')}"
            )
        progress.notice(f"model {settings.output_dir}")


def scores_text(adapted: AdaptedModel, query: str) -> str:
    """The accuracy on the query set, and the metrics of the learner."""
    text, numbers = f"{counted(len(adapted.predictions), 'answer')} to {query}", adapted.metrics.items()
    if adapted.accuracy is not None:
        text = f"accuracy on {query}: {100 * adapted.accuracy:.1f} % of {len(adapted.predictions)}"
    return ", ".join([text, *(f"{name} {value:.4g}" for name, value in numbers)])


def adapt(
    settings: AdaptConfig,
    progress: Progress,
    support: Examples | None = None,
    query: Examples | None = None,
) -> AdaptedModel:
    """Adapt to the task of the examples `support`, or of the file `settings.support`; the query set likewise.

    A folder is written if `settings.output_dir` is set. Raises `UsageError`.
    """
    refuse_first(
        [
            (
                support is None and Path(settings.support).is_dir(),
                f"support={settings.support} is a directory; give a file, or use adapt_many",
            ),
            (
                settings.deepspeed or settings.group_size not in ("auto", "1"),
                f"deepspeed={settings.deepspeed} and group_size={settings.group_size} go with a directory of"
                " support files, and one task is adapted to in one process; leave them out",
            ),
        ]
    )
    world = World(Launch(), pick_device(Launch()))
    sources: Sources = [(None, settings.support if support is None else support)]
    found: list[AdaptedModel] = []
    with tasks_of(settings, sources, world, progress) as (settings, (tasks, _, _)):
        queries, facts = read_queries(settings, query, tasks[0], progress.notice)

        def finish(learner: TaskLearner, learned: Encoded) -> None:
            """Answer the query set, and write the folder."""
            adapted = model_of(learner, learned)
            if learned.weights is not None:
                learner.hold(learned.weights)
            adapted.answer_queries(queries, settings.max_new_tokens, facts)
            if settings.output_dir:
                write_task(adapted, learner, learned)
            found.append(replace(adapted, output_dir=settings.output_dir))

        learn_all(settings, tasks, world, progress, finish)
    return found[0]


def read_queries(
    settings: AdaptConfig, query: Examples | None, task: TaskExamples, notice: Callable[[str], None]
) -> tuple[list[Any], dict[str, Any]]:
    """The query set of a task, and what is known of the task with it. Logs rows that the model or the task
    has learned from. Raises `UsageError`.
    """
    config, name = settings.run_config(n_way=2), settings.query or "query"
    source, kind = settings.query or None if query is None else query, config.learner.kind
    tokenizer = load_tokenizer(config, describe(config), lambda text: None)
    queries = read_task("query", source, config, notice, tokenizer=tokenizer)
    rows = queries.rows(kind)
    with prefixed(f"{'query=' if settings.query else ''}{name}:"):
        facts = kind.facts(task.table.rows(kind), rows)
    if shared := len(set(queries.content) & set(task.table.content)):
        notice(
            Warn(
                f"{name}: {counted(shared, 'row')} of {len(set(queries.content))} are in the support set too,"
                " by their contents; the accuracy on them is not that on new rows: leave them out"
            )
        )
    return rows, facts


def adapt_many(
    settings: AdaptConfig, progress: Progress, supports: Mapping[str, str | Examples] | None = None
) -> AdaptedModels:
    """Adapt to each task of `supports` (file or examples by name), or of the files in `settings.support`.

    Raises `UsageError` for what concerns all tasks. Collective: world.
    """
    launch, output = Launch.from_env(os.environ), Path(settings.output_dir or "")
    if supports is None:
        folder = Path(settings.support)
        if message := texts_beside_rows(folder):
            progress.notice(Warn(message))
        sources = sorted((stem(path), str(path)) for path in files_of(folder) or text_files(folder))
    else:
        sources = [*supports.items()]
    refuse_first(
        [
            (not settings.output_dir, "output_dir is missing; name a folder for the adapted models"),
            (
                not sources,
                f"support={settings.support or '{}'} holds no tasks; give a {', '.join(ENDINGS)} file (.gz"
                " too) or examples for each",
            ),
        ]
    )
    with (
        closing(World(launch, pick_device(launch))) as world,
        tasks_of(settings, sources, world, progress) as (settings, (tasks, complete, failed)),
    ):
        failed |= learn_all(
            settings,
            tasks,
            world,
            progress,
            lambda learner, learned: write_task(model_of(learner, learned), learner, learned),
        )
    learned = [str(one.name) for one in tasks if one.name not in failed]
    progress.notice(
        f"models {output}: {len(learned)} learned, {len(complete)} complete before, {len(failed)} failed"
    )
    shared = {name: getattr(settings, name) for name in ("trust_remote_code", "attn_implementation")}
    return AdaptedModels(output, [*learned, *complete], failed, shared)


@contextmanager
def tasks_of(
    settings: AdaptConfig, sources: Sources, world: World, progress: Progress
) -> Iterator[tuple[AdaptConfig, Found]]:
    """The settings with the folder of the model, and the tasks; `output_dir` is locked within.

    Raises `UsageError`. Collective: world.
    """
    name = local_model(settings.model_name_or_path, world, progress.notice, Config.prepare_timeout)
    settings, payload = replace(settings, model_name_or_path=name), b""
    with ExitStack() as stack:
        with world.comm.raise_on_all("reading the support sets"):
            if world.launch.global_rank == 0:
                if settings.output_dir:
                    stack.enter_context(closing(lock_folder(Path(settings.output_dir), timeout_s=10)))
                tasks, complete, failed = find_tasks(settings, sources, progress.notice)
                found = [{**vars(one), "table": vars(one.table)} for one in tasks], complete, failed
                payload = json.dumps(found, default=lambda content: b64encode(content).decode()).encode()
        stored, complete, failed = json.loads(world.comm.broadcast_bytes(payload))
        tasks = [
            TaskExamples(one["name"], table_of(one["table"]), tuple(one["labels"]), one["facts"])
            for one in stored
        ]
        yield settings, (tasks, complete, failed)


def table_of(stored: dict[str, Any]) -> Table:
    """The table whose fields are `stored` as JSON."""
    images = [EncodedImage(where, content and b64decode(content)) for where, content in stored["image"]]
    return Table(**{**stored, "image": images})


def find_tasks(settings: AdaptConfig, sources: Sources, notice: Callable[[str], None]) -> Found:
    """Read the tasks, and remove what an interrupted command has left. Raises `UsageError`."""
    config, output = settings.run_config(n_way=2), Path(settings.output_dir or "")
    description, method = describe(config), settings.method_of(config)
    tokenizer = load_tokenizer(config, description, lambda text: None)
    tasks, complete, failed = list[TaskExamples](), list[str](), dict[str, str]()
    counts = Counter(name for name, _ in sources)
    for name, source in sources:
        try:
            if name is not None:
                check_source(name, source, counts[name], settings.support)
            elif settings.output_dir:
                refuse_files(output)
            if settings.output_dir:
                remove_partial(partial_folder(output, name))
            table = read_task("support", source, config, notice, name, tokenizer)
            if name is not None and is_complete(output / name, table, settings, method):
                complete.append(name)
            else:
                tasks.append(support_set(name, table, settings, config, notice))
        except ChangedSettings:
            raise
        except UsageError as error:
            fail(failed, name, str(error), notice)
    return tasks, complete, failed


def fail(failed: dict[str, str], name: str | None, error: str, notice: Callable[[str], None]) -> None:
    """Log and store why a task fails, once. Raises `UsageError` for the only task."""
    if name is None:
        raise UsageError(error)
    if name not in failed:
        failed[name] = error
        notice(Warn(f"task {shortened(name)} failed: {error}"))


def check_source(name: str, source: str | Examples, files: int, folder: str) -> None:
    """Raise `UsageError` for a task's name that cannot be that of a folder, for one of several files, and for
    a file that cannot be read, or that is a link out of `folder`.
    """
    given, size = f"support: the task's name {name[:40]!r}", len(name.encode(errors="surrogatepass"))
    refuse_first(
        [
            (
                not name or name.startswith(".") or "/" in name or printable(name) != name,
                f"{given} is empty, begins with a dot, or holds a slash or a control character, and becomes"
                " a folder's name; rename it",
            ),
            (size > LONGEST, f"{given} has {size} bytes, more than {LONGEST}; rename it"),
            (files > 1, f"task {name} has several files; rename or remove all but one"),
        ]
    )
    if isinstance(source, str):
        file = inside(Path(folder), Path(source)) if folder else Path(source)
        if not file.is_file() or not (ending(file) or is_document(file)):
            raise UsageError(
                f"support={source} is no {', '.join(ENDINGS)} file (.gz too), or is not there; restore it, or"
                " give another"
            )


def learn_all(
    settings: AdaptConfig,
    tasks: Sequence[TaskExamples],
    world: World,
    progress: Progress,
    finish: Callable[[TaskLearner, Encoded], None],
) -> dict[str, str]:
    """Learn the tasks; why some failed, by name, on every rank. Collective: world.

    finish: called on the first rank of a group after each task that it has learned.
    """
    if not tasks:
        return {}
    ranks = split(settings, world)
    by_key: dict[tuple[int, bool], list[TaskExamples]] = {}
    with world.comm.raise_on_all("reading settings"):
        keys = {labels: head_key(settings, labels) for labels in {one.labels for one in tasks}}
    for one in tasks:
        by_key.setdefault(keys[one.labels], []).append(one)
    failed, before = dict[str, str](), 0
    for (_, learned), group in by_key.items():
        classes, labels = max(len(one.labels) for one in group), group[0].labels if learned else ()
        learner = TaskLearner(settings, classes, progress, labels, ranks)
        if learner.config.lora_r == 0 and world.launch.world_size > 1:
            raise UsageError(
                f"lora_r=0 with {world.launch.world_size} ranks: whole models are adapted in one process;"
                " give --lora_r, or start one process"
            )
        with world.comm.raise_on_all("adapting"):
            learn_share(learner, group, finish, failed, before, len(tasks))
        before += len(group)
        del learner  # frees the weights before the next model is loaded
    for of_rank in world.comm.gather(failed):
        for name, error in sorted(of_rank.items()):  # of other groups, which log nothing
            fail(failed, name, error, progress.notice)
    return failed


def split(settings: AdaptConfig, world: World) -> ProcessGroups:
    """The groups of the launch. Raises `UsageError`. Collective: world."""
    with world.comm.raise_on_all("reading settings"):
        stage = deepspeed_config.read(settings.deepspeed, settings.bf16, lambda text: None).zero_stage
    size = world.launch.world_size if stage == 3 else 1
    if settings.group_size != "auto":
        size = int(settings.group_size)
    return world.split(size, default_group=size > 1)


def learn_share(
    learner: TaskLearner,
    tasks: Sequence[TaskExamples],
    finish: Callable[[TaskLearner, Encoded], None],
    failed: dict[str, str],
    done: int,
    total: int,
) -> None:
    """Learn this group's rounds of tasks, of `total` of which `done` are learned; store why some failed.

    Raises `UsageError` if the only task fails. Collective: group.
    """
    encoded, ranks, progress = list[Encoded](), learner.model.ranks, learner.progress
    output, step = Path(learner.settings.output_dir or ""), ranks.layout.num_groups
    for task in tasks:
        try:
            encoded.append(learner.encode(task))
        except UsageError as error:
            fail(failed, task.name, str(error), progress.notice)
    for tasks_here in learner.rounds(encoded)[ranks.layout.group_index :: step]:
        for learned in learner.learn(tasks_here):
            name = learned.task.name
            if learned.failure:
                fail(failed, name, learned.failure, progress.notice)
            else:
                ranks.group.on_first(
                    f"writing {output / (name or '')}", lambda learned=learned: finish(learner, learned)
                )
            done += step
            if name is not None:
                progress.line("tasks learned", min(done, total), total, stride=step)


def model_of(learner: TaskLearner, learned: Encoded) -> AdaptedModel:
    """The model of a task, for the weights that the worker holds, with the names of its classes."""
    loaded, labels = learner.model, learned.task.labels
    if labels:
        description = with_labels(loaded.config, loaded.description, labels)
        loaded = replace(loaded, description=description, config=replace(loaded.config, n_way=len(labels)))
    if learner.prompts:
        loaded = replace(loaded, prompt_examples=learned.examples)
    return AdaptedModel(labels, learned.steps, learned.left_out, replace(loaded, facts=learned.task.facts))
