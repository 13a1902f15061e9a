"""The outer loop of `MetaTrainer.train`: the algorithm's rule over the steps of a schedule."""

from collections.abc import Sequence
from contextlib import closing

from fmmeta.meta.task import MultiTaskRule, Rule, TaskRun
from fmmeta.training.run import Run


def train(run: Run) -> None:
    """Run the outer steps that are left.

    Raises `Stopped` after a signal, with the state saved. Collective: world.
    """
    with closing(run.outer_schedule.steps()) as steps:
        for step in steps:
            for tasks in step.passes():
                learn(tasks, run.rule, run.multi_task_rule)
            step.update()


def learn(tasks: Sequence[TaskRun], rule: Rule, multi_task_rule: MultiTaskRule | None) -> None:
    """Add the meta-gradients of tasks that share passes. Collective: group."""
    if multi_task_rule is None:
        for task in tasks:
            with task:
                task.result = rule(task)
        return
    for task, result in zip(tasks, multi_task_rule(tasks), strict=True):
        with task:
            task.result = result
