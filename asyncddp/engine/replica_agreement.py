"""Agreement on sharded replicas, each of which is several ranks.

The law: a replica takes part while all of its ranks do, so that one verdict holds for all of it.
Each rank of a replica is in a column, a group with one rank of every replica. The agreement is one,
among all ranks: it compares how often each name was used in any column, and a view begins with the
same round of a name in all of them. No messages are sent in a column.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from typing_extensions import override

from asyncddp.engine.membership_changes import ENDED, MembershipChanges
from asyncddp.membership import Agreement, MembershipMessage, View


class ReplicaAgreement(Agreement):
    """Views of replicas in one column, which follow from the views of all ranks.

    Args:
        ranks: The views of all ranks.
        replicas: The ranks of each replica.
        replica: The replica of this rank, which is its number in the group.
        names: What names are called among all ranks: in all groups alike, and in this one alone.

    Attributes:
        count: Returns how often each name has been used in the group; constant while frozen.
    """

    def __init__(
        self,
        ranks: MembershipChanges,
        replicas: Sequence[Collection[int]],
        replica: int,
        names: tuple[str, str],
    ) -> None:
        self.count: Callable[[], Mapping[str, int]] = dict
        super().__init__(replica, range(len(replicas)), lambda: self.count())
        self._ranks, self._replicas, (self._shared, self._own) = ranks, replicas, names
        self._coming: deque[View] = deque()  # of all ranks, that have yet to begin here
        self._accused: frozenset[int] = frozenset()  # ranks, as of the last promise

    @property
    @override
    def frozen(self) -> bool:
        return self._ranks.frozen or bool(self._coming)

    @property
    @override
    def settled(self) -> bool:
        return not self._coming

    @property
    @override
    def accused(self) -> frozenset[int]:
        here = self.view.members
        return frozenset(
            replica for replica in here if not self._accused.isdisjoint(self._replicas[replica])
        )

    @override
    def suspect(self, rank: int, *, certified: bool, reason: str, now: float) -> None:
        """Leave it to the agreement of all ranks, which has the same evidence."""

    @override
    def outgoing(self) -> list[tuple[int, MembershipMessage]]:
        self.isolated = self.isolated or self._ranks.isolated
        return []

    def learn(self, view: View) -> None:
        """Take a view of all ranks, before their rounds go on in it."""
        self._coming.append(view)

    @override
    def tick(self, now: float) -> None:
        """Go on to the next view, if there is one."""
        if self._coming:
            self.view = self._of_replicas(self._coming[0])
            self._coming.popleft()  # last, so that it is frozen meanwhile
            if not self.joined:
                self.isolated = f"view {self.view.number} leaves out this rank's replica"

    def _of_replicas(self, view: View) -> View:
        before, ranks = self.view.members, set(view.members)
        members = tuple(replica for replica in before if ranks.issuperset(self._replicas[replica]))
        left = tuple(replica for replica in before if replica not in members)
        starts = {
            name.removeprefix(self._shared): number
            for name, number in view.starts.items()
            if name.startswith(self._shared)
        }
        starts[ENDED] = view.starts.get(self._own + ENDED, 0)
        return View(view.number, members, starts, left=left, voters=members)

    def promised(self) -> dict[str, int]:
        """Return the counts of the group, by their names among all ranks, whose lock is held."""
        self._accused = self._ranks.accused
        counts = self.count()
        return {
            f"{self._own if name == ENDED else self._shared}{name}": number
            for name, number in counts.items()
        }
