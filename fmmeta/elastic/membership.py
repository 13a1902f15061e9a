"""The members of an outer step of an elastic run, and the roles that follow. Arithmetic only.

Every group computes the same from the same answer: which group sends its state (`root`), which groups need
it (`heals`), and which one writes the files.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupInfo:
    """A group as a member of an outer step."""

    name: str
    venue: str
    step: int
    fresh: bool  # it has not taken part yet
    writes: bool
    met: str  # the meeting that its communicator is from; empty: none, or it has failed
    mark: str  # settings and layout, which all must share


@dataclass(frozen=True)
class Membership:
    """The members of a step, equal on all groups; `here` is the index of this group.

    Members are in the order of their names.
    """

    members: tuple[GroupInfo, ...]
    here: int
    # they have met for this step: what follows a change is judged by this, since each remembers other rolls
    anew: bool = False
    strangers: int = 0  # listed by the lighthouse and left out: they do not know the secret of the run

    @property
    def root(self) -> int:
        """The donor of state: the first group with the highest step; new groups come last."""
        return min(range(len(self.members)), key=lambda n: (self.members[n].fresh, -self.members[n].step, n))

    def heals(self, number: int) -> bool:
        """Whether a member needs the state of the root: it is new, or missed the end of a step."""
        member, root = self.members[number], self.members[self.root]
        return number != self.root and (member.fresh or member.step != root.step)

    @property
    def writer(self) -> int:
        """The group that writes checkpoints and metrics: the previous writer, else the first with state."""
        return min(range(len(self.members)), key=lambda n: (not self.members[n].writes, self.heals(n), n))
