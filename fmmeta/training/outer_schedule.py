"""What an outer schedule is: which task is next, when an outer step closes, which groups are members.

    for step in schedule.steps():          forms the groups, validates, saves; ends after a stop
        for task in step.tasks():          those of this group
            ...                            a rule, or a loop over task.step and task.backward
        step.update()                      the reduction over all groups, clipping, the outer optimizer

`static`: each group runs its share of the meta-batch. `dynamic`: a group that is free claims the next task.
`stale`: a step closes without waiting for groups that are slower. `elastic`: groups come and go. A schedule
is found by name and gets the `Run`; yours is a subclass of one of them, `--task_schedule module:class`.
"""

import enum
import pkgutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Protocol

from fmmeta.common.errors import UsageError
from fmmeta.common.security import import_named
from fmmeta.config.settings import Config
from fmmeta.meta.task import TaskRun


class Outcome(enum.Enum):
    """What an outer step did to theta."""

    APPLIED = "theta moved"
    SKIPPED_NONFINITE = "no task was finite, or the meta-gradient was not"
    NO_DATA = "no task was loaded"
    STOP = "the step was abandoned"


class Step(Protocol):
    """An outer step that is open."""

    number: int  # outer steps applied before it

    def tasks(self) -> Iterator[TaskRun]:
        """This group's tasks, to be run in `with task:` one after the other. Collective: group.

        With `static` a loop may leave the last ones out, if all ranks of the group do so.

        A task whose block raises an error before `backward` has no part in the step, on all ranks of the
        group; `on_bad_task` decides about it as about one that fails to load. Errors of fmmeta end the run.
        """
        ...

    def passes(self) -> Iterator[list[TaskRun]]:
        """The same tasks for a rule: those that share passes (--tasks_per_pass) in one list."""
        ...

    def between_passes(self) -> None:
        """To be called between two passes outside of `TaskRun`, whose methods call it. Collective: group."""
        ...

    def update(self) -> Outcome:
        """Reduce the meta-gradients of all groups and apply their mean, validate, save. Collective: world."""
        ...


class OuterSchedule(Protocol):
    """One for a run."""

    def steps(self) -> Generator[Step]:
        """The outer steps that are left. Each needs `update` before the next one.

        Raises `Stopped` after a signal, with the state saved. Collective: world.
        """
        ...

    def unfinished(self) -> dict[str, Any] | None:
        """What a checkpoint stores of tasks that run meanwhile. Collective: world."""
        ...

    def compare_theta(self) -> None:
        """Raise `MachineFault` if theta is not the same on all groups. Collective: world."""
        ...

    def newer_than(self, refused: Path) -> Path:
        """The checkpoint to load instead of one that cannot be read; `refused` if there is no other.

        Collective: world.
        """
        ...

    def close(self) -> None:
        """Release what the schedule holds, after the last file of the run is written. Local."""
        ...


SCHEDULES = {
    "static": "fmmeta.training.schedules:StaticSchedule",
    "dynamic": "fmmeta.training.schedules:DynamicSchedule",
    "stale": "fmmeta.training.bounded_staleness:StaleSchedule",
    "elastic": "fmmeta.elastic.controller:ElasticSchedule",
}
"""Name -> module:class."""


def schedule_of(config: Config) -> Any:
    """The class of the schedule that the settings ask for. Raises `UsageError`."""
    name = "elastic" if config.elastic else "stale" if config.max_staleness else config.task_schedule
    if name in SCHEDULES:
        return pkgutil.resolve_name(SCHEDULES[name])
    found = import_named("task_schedule", name, "an outer schedule")
    if not (isinstance(found, type) and hasattr(found, "steps")):
        raise UsageError(
            f"task_schedule={name} is no class with `steps`; name a subclass of"
            " fmmeta.training.schedules.StaticSchedule"
        )
    return found
