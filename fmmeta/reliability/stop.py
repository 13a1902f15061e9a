"""Lets all ranks agree to stop at a safe point.

    should_leave_tasks()   between two tasks or episodes: does this group leave the remaining ones?    group
    agree_after_tasks()    after the tasks of an outer step: is the step abandoned? is a save done?    world
    agree()                has any rank received a stop signal?                                        world

A stop costs at most one task of each group, these agreements and a save: tasks are left out, never cut in
two. If one group leaves its tasks, all groups abandon the outer step, since theta is a function of whole
meta-batches; if no group does, the step is finished.
"""

import torch

from fmmeta.checkpoint.write import Saver
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.reliability.signals import Signals


class StopAgreement:
    """One for a run. requested: whether all ranks know that the run has to stop."""

    def __init__(self, ranks: ProcessGroups, signals: Signals) -> None:
        self.ranks, self.signals, self.requested = ranks, signals, False

    def should_leave_tasks(self) -> bool:
        """Whether a rank of this group has received a stop signal. Collective: group."""
        asked = torch.tensor([float(bool(self.signals.asked))])
        return float(self.ranks.group.sum_(asked)) > 0

    def agree_after_tasks(self, left_tasks: bool, saver: Saver) -> bool:
        """Whether all groups abandon this outer step, because one has left tasks of it.

        left_tasks: whether this group has. The ranks also learn whether a checkpoint in the background is
        done. Raises `UsageError` if too many checkpoints failed. Collective: world.
        """
        saved = saver.folder is not None and saver.done
        mine = [left_tasks, bool(self.signals.asked), saved, bool(saver.failure)]
        left, asked, done, failed = self.ranks.world.sum_(torch.tensor(mine, dtype=torch.float64)).tolist()
        self.requested = asked > 0 or left > 0
        if done == self.ranks.world.size:
            saver.judge(failed > 0)
        return left > 0

    def agree(self) -> bool:
        """Whether any rank has received a stop signal; all then have its name. Collective: world."""
        names = [name.decode() for name in self.ranks.world.gather_bytes(self.signals.asked.encode()) if name]
        self.requested = self.requested or bool(names)
        self.signals.asked = names[0] if names else ""
        return self.requested
