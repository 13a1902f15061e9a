"""The members of an outer step of an elastic run, and the roles that follow. Arithmetic only.

Every group computes the same from the same answer of the lighthouse: which group sends its state (`donor`),
which groups need it (`needs_state`), and which one writes the files (`writer`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupInfo:
    """A group as a member of an outer step."""

    name: str
    store_address: str
    step: int
    fresh: bool  # it has not taken part yet
    writes: bool
    connection: str  # the quorum that its communicator was connected for; empty: it has none
    config_hash: str  # of settings and layout, which all must share

    @property
    def label(self) -> str:
        """The name that the user gave."""
        return self.name.rpartition(":")[0]


@dataclass(frozen=True)
class Membership:
    """The members of a step, the same on all groups, in the order of names. here: index of this group.

    restarted: all members have connected for this step. Every member sees the same value, unlike a comparison
    with the last membership that it took part in. unknown_groups: groups listed by the lighthouse and left
    out, because they do not know the secret of the run.
    """

    members: tuple[GroupInfo, ...]
    here: int
    restarted: bool = False
    unknown_groups: int = 0

    @property
    def donor(self) -> int:
        """The group that sends its state: the first with the highest step; new groups come last."""
        return min(range(len(self.members)), key=lambda n: (self.members[n].fresh, -self.members[n].step, n))

    def needs_state(self, number: int) -> bool:
        """Whether a member needs the state of the donor: it is new, or missed the end of a step."""
        member, donor = self.members[number], self.members[self.donor]
        return member is not donor and (member.fresh or member.step != donor.step)

    @property
    def writer(self) -> int:
        """The group that writes checkpoints and metrics: the previous writer, else the first with state."""
        members = self.members
        return min(range(len(members)), key=lambda n: (not members[n].writes, self.needs_state(n), n))
