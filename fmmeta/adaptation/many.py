"""`fmmeta adapt --support DIRECTORY` and `fmmeta.adapt_many`: adapts a model to many tasks.

    support files --> tasks without a complete folder --> rounds of tasks of similar sizes, over all groups
                  --> a folder per task: written under a temporary name, renamed when it is complete

Every group takes each num_groups-th round; the ranks of a group share the rows of a task. The folders are the
state of the command: the same command again skips complete ones and learns the others. A task that fails is
logged and skipped; the others are learned.
"""

import json
import os
import shutil
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fmmeta.adaptation import model
from fmmeta.adaptation.folder import (
    NOT_IDENTIFYING,
    PARTIAL,
    identifying,
    store_base_path,
    support_digest,
    write_folder,
)
from fmmeta.adaptation.model import AdaptedModel, with_labels
from fmmeta.adaptation.task_learner import (
    Encoded,
    Learned,
    TaskExamples,
    TaskLearner,
    head_key,
    read_task,
    support_set,
)
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.security import inside, one_line, printable, publish, sync
from fmmeta.common.text import shortened
from fmmeta.config.fields import refuse_first
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import AdaptConfig, PredictConfig
from fmmeta.models.files import SETTINGS_FILE, weights_state
from fmmeta.models.load import describe
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import ProcessGroups, World, pick_device
from fmmeta.tasks.data.images import EncodedImage
from fmmeta.tasks.data.rows import ENDINGS, Examples, Table, ending, files_of, listed, stem
from fmmeta.tasks.data.splits import few
from fmmeta.training.build import local_model
from fmmeta.training.run_folder import lock_folder

LONGEST = 200  # bytes of a task's name; file systems take 255


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


@dataclass(frozen=True)
class FoundTasks:
    """Tasks to learn, names of those with a complete folder, and why others cannot be learned, by name."""

    to_learn: list[TaskExamples]
    complete: list[str]
    failed: dict[str, str]

    def as_bytes(self) -> bytes:
        tasks = [
            [one.name, one.table.input, one.table.target, one.table.image, one.labels]
            for one in self.to_learn
        ]
        found = [tasks, self.complete, self.failed]
        return json.dumps(found, default=lambda content: b64encode(content).decode()).encode()

    @classmethod
    def of_bytes(cls, payload: bytes) -> "FoundTasks":
        tasks, complete, failed = json.loads(payload)
        return cls(
            [
                TaskExamples(
                    name,
                    Table(
                        targets,
                        [],
                        [],
                        inputs,
                        targets,
                        image=[
                            EncodedImage(where, None if content is None else b64decode(content))
                            for where, content in images
                        ],
                    ),
                    tuple(labels),
                )
                for name, inputs, targets, images, labels in tasks
            ],
            complete,
            failed,
        )


def run(settings: AdaptConfig) -> None:
    """`fmmeta adapt` with a directory. Raises `UsageError` with the number of failed tasks at the end."""
    launch = Launch.from_env(os.environ)
    models = adapt_many(settings, Progress(enabled=launch.global_rank == 0))
    if models.failed:
        names = [shortened(name) for name in sorted(models.failed)]
        raise UsageError(
            f"support={settings.support}: {len(models.failed)} of {len(models) + len(models.failed)} tasks"
            f" failed ({few(names)}), each with a line above; the other {len(models)} are in"
            f" {settings.output_dir}: fix the failed ones, and run the same command again"
        )


def adapt_many(
    settings: AdaptConfig, progress: Progress, supports: Mapping[str, str | Examples] | None = None
) -> AdaptedModels:
    """Adapt to each task of `supports` (file or examples by name), or of the files in `settings.support`.

    Raises `UsageError` for what concerns all tasks. Collective: world.
    """
    launch = Launch.from_env(os.environ)
    with closing(World(launch, pick_device(launch))) as world:
        lock, name = None, settings.model_name_or_path
        settings = replace(
            settings,
            model_name_or_path=local_model(name, world, progress.notice, Config.prepare_timeout),
        )
        try:
            with world.comm.raise_on_all("reading the support sets"):
                if not settings.output_dir:
                    raise UsageError("output_dir is missing; name a folder for the adapted models")
                output, payload = Path(settings.output_dir), b""
                if launch.global_rank == 0:
                    lock = lock_folder(output, timeout_s=10)
                    payload = find_tasks(settings, supports, output, progress.notice).as_bytes()
            tasks = FoundTasks.of_bytes(world.comm.broadcast_bytes(payload))
            failed = {**tasks.failed, **learn_all(settings, tasks, output, world, progress)}
        finally:
            if lock is not None:
                lock.close()
    learned = [one.name for one in tasks.to_learn if one.name not in failed]
    progress.notice(
        f"models {output}: {len(learned)} learned, {len(tasks.complete)} complete before,"
        f" {len(failed)} failed"
    )
    shared = {
        "trust_remote_code": settings.trust_remote_code,
        "attn_implementation": settings.attn_implementation,
    }
    return AdaptedModels(output, [*learned, *tasks.complete], failed, shared)


def find_tasks(
    settings: AdaptConfig,
    supports: Mapping[str, str | Examples] | None,
    output: Path,
    notice: Callable[[str], None],
) -> FoundTasks:
    """Read the tasks, and remove what an interrupted command has left. Raises `UsageError`."""
    config = settings.run_config(n_way=2)
    images, method = describe(config).images, settings.method_of(config)
    to_learn, complete, failed = list[TaskExamples](), list[str](), dict[str, str]()
    sources: Sequence[tuple[str, str | Examples]] = (
        list(supports.items()) if supports is not None else support_files(Path(settings.support))
    )
    if not sources:
        raise UsageError(
            f"support={settings.support or '{}'} holds no tasks; give a {', '.join(ENDINGS)} file (.gz too)"
            " or examples for each"
        )
    files = Counter(name for name, _ in sources)
    for name, source in sources:
        try:
            check_name(name)
            if files[name] > 1:
                raise UsageError(f"task {name} has several files; rename or remove all but one")
            if isinstance(source, str):
                check_file(source, settings.support if supports is None else None)
            else:
                source = listed(name, source)
            table = read_task("support", source, config, notice, name, images)
            if is_complete(output / name, table, settings, method):
                complete.append(name)
            else:
                remove_partial(output / f".{name}{PARTIAL}")
                to_learn.append(support_set(name, table, settings, config, notice))
        except ChangedSettings:
            raise
        except UsageError as error:
            if name not in failed:  # of several files
                notice(failure(name, str(error)))
            failed.setdefault(name, str(error))
    return FoundTasks(to_learn, complete, failed)


def remove_partial(folder: Path) -> None:
    """Remove what an interrupted command has left of a task. Raises `UsageError` for a file or link."""
    if os.path.lexists(folder):
        if folder.is_symlink() or not folder.is_dir():
            raise UsageError(
                f"output_dir={folder.parent}: {folder.name} is no folder, and the task is first written under"
                " this name; move it away"
            )
        shutil.rmtree(folder)


def support_files(folder: Path) -> list[tuple[str, str]]:
    """Name of the task and path of each data file of a folder, sorted."""
    return sorted((stem(path), str(path)) for path in files_of(folder))


def check_file(path: str, folder: str | None) -> None:
    """Raise `UsageError` for a support file that cannot be read, or that is a link out of its folder."""
    if folder is not None:
        inside(Path(folder), Path(path))
    kinds = f"{', '.join(ENDINGS)} file (.gz too)"
    refuse_first(
        [
            (not Path(path).exists(), f"support={path} is not there; restore it, or give another {kinds}"),
            (not Path(path).is_file() or not ending(Path(path)), f"support={path} is no {kinds}; give one"),
        ]
    )


def check_name(name: str) -> None:
    """Raise `UsageError` for a task's name that cannot be the name of a folder."""
    wrong = None
    if not name or name.startswith("."):
        wrong = "is empty or begins with a dot"
    elif "/" in name or os.sep in name or printable(name) != name:
        wrong = "holds a slash or a control character"
    elif len(os.fsencode(name)) > LONGEST:
        wrong = f"has {len(os.fsencode(name))} bytes, more than {LONGEST}"
    if wrong:
        raise UsageError(
            f"support: the task's name {name[:40]!r} {wrong}, and becomes a folder's name; rename it"
        )


class ChangedSettings(UsageError):
    """The folders are of a command with other settings."""


def is_complete(folder: Path, table: Table, settings: AdaptConfig, method: str) -> bool:
    """Whether the folder holds the model of this task. method: the one in use.

    Raises `UsageError` for a folder of something else.
    """
    if not folder.exists() and not folder.is_symlink():
        return False
    stored = None
    try:
        stored = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))["adapted"]
        before, digest = dict(stored["settings"]), stored["support"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"output_dir={folder.parent}: {folder.name} is there, and its {SETTINGS_FILE} is not of fmmeta"
            f" adapt ({getattr(error, 'strerror', None) or one_line(error)}); move it away, or choose another"
            " output_dir"
        ) from None
    now = json.loads(json.dumps(identifying(settings, method)))
    before = {name: value for name, value in before.items() if name not in NOT_IDENTIFYING}
    before, now = ({"method": "finetune", **values} for values in (before, now))
    if before != now:
        differ = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        texts = [f"{name} {before.get(name)} -> {now.get(name)}" for name in differ]
        raise ChangedSettings(
            f"output_dir={folder.parent} holds models of a command with other settings"
            f" ({'; '.join(texts)}); use the values before ->, or another output_dir"
        )
    weights = weights_state(settings.model_name_or_path)
    if stored.get("weights", weights) != weights:
        raise ChangedSettings(
            f"output_dir={folder.parent}: {folder.name} was learned from other weights than those of"
            f" model_name_or_path={settings.model_name_or_path} now; remove the folders to learn the tasks"
            " again, or use another output_dir"
        )
    if digest != support_digest(table):
        raise UsageError(
            f"output_dir={folder.parent}: {folder.name} was learned from other examples; remove the folder to"
            " learn the task again, or choose another output_dir"
        )
    return True


def learn_all(
    settings: AdaptConfig, tasks: FoundTasks, output: Path, world: World, progress: Progress
) -> dict[str, str]:
    """Learn the tasks and write their folders; why some failed, by name, on every rank. Collective: world."""
    if not tasks.to_learn:
        return {}
    ranks = split(settings, world)
    by_key: dict[tuple[int, bool], list[TaskExamples]] = {}
    with world.comm.raise_on_all("reading settings"):
        keys = {labels: head_key(settings, labels) for labels in {one.labels for one in tasks.to_learn}}
    for one in tasks.to_learn:
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
            failed |= learn_share(learner, group, output, progress, before, len(tasks.to_learn))
        before += len(group)
        del learner  # frees the weights before the next model is loaded
    parts = world.comm.gather_bytes(json.dumps(failed).encode())
    everywhere = {name: text for part in parts for name, text in json.loads(part).items()}
    for name in sorted(everywhere.keys() - failed.keys()):  # of other groups, which log nothing
        progress.notice(failure(name, everywhere[name]))
    return everywhere


def failure(name: str, error: str) -> Warn:
    return Warn(f"task {shortened(name)} failed: {error}")


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
    tasks: list[TaskExamples],
    output: Path,
    progress: Progress,
    before: int,
    total: int,
) -> dict[str, str]:
    """Learn this group's rounds of tasks and write their folders; why some failed. Collective: group."""
    encoded, failed, done = list[Encoded](), dict[str, str](), before

    def fail(name: str, error: str) -> None:
        failed[name] = error
        progress.notice(failure(name, error))

    ranks = learner.model.ranks
    for task in tasks:
        try:
            encoded.append(learner.encode(task))
        except UsageError as error:
            fail(task.name, str(error))
    rounds = learner.rounds(encoded)
    for tasks_here in rounds[ranks.layout.group_index :: ranks.layout.num_groups]:
        for learned in learner.learn(tasks_here):
            if learned.failure:
                fail(learned.task.name, learned.failure)
            else:
                with ranks.group.raise_on_all(f"writing {output / learned.task.name}"):
                    if ranks.group.rank == 0:
                        write_task(learner, learned, output)
            done += ranks.layout.num_groups
            progress.line("tasks learned", min(done, total), total, stride=ranks.layout.num_groups)
    return failed


def write_task(learner: TaskLearner, learned: Learned, output: Path) -> None:
    """Write the folder of a task, complete or not at all."""
    model, task = learner.model, learned.task
    own = replace(model, description=with_labels(model.description, task.labels)) if task.labels else model
    if task.labels:
        own = replace(own, config=replace(model.config, n_way=len(task.labels)))
    folder, partial = output / task.name, output / f".{task.name}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    temporary = partial / task.name  # the card's title
    temporary.mkdir(parents=True)
    try:
        adapted = AdaptedModel(task.labels, learned.steps, learned.left_out, own)
        write_folder(adapted, temporary, learner, learned)
        store_base_path(temporary, folder)
        for path in temporary.rglob("*"):
            sync(path)
        publish(temporary, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
