"""Membership view: members of a run, the rounds from which they take part, and quorums."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec


class View(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Membership view: the agreed set of members of a run; views are numbered from 0.

    Rounds of a name below ``starts[name]`` belong to the earlier view, later rounds to this one. A
    name that is not in ``starts`` starts at 0. A rank that joins becomes a voter in the first later
    view that all living voters have promised, and is ``fresh`` in that view. A rank that is
    ``leaving`` stays a member of the agreement until its process has ended.

    Example:
        >>> View.first([0, 1, 2]).members
        (0, 1, 2)
    """

    number: int
    members: tuple[int, ...]  # ascending
    starts: Mapping[str, int]
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    voters: tuple[int, ...] = ()  # the members whose promises and acceptances decide; ascending
    fresh: tuple[int, ...] = ()  # the voters that were none in the view before
    unfenced: tuple[int, ...] = ()  # former voters that may live and not know that they are out
    leaving: tuple[int, ...] = ()  # members that have asked to take no part any more

    @classmethod
    def first(cls, members: Collection[int], number: int = 0) -> View:
        """Make the view with which a run begins, in which every member votes."""
        everyone = tuple(sorted(members))
        return cls(number, everyone, {}, voters=everyone)

    def is_quorum(self, ranks: Collection[int], dead: Collection[int]) -> bool:
        """Return whether these ranks may decide the next view, given ranks that act no more.

        All voters that are not dead may. Else it takes more than half of all voters, or half with
        the lowest one, of which one at least is not fresh.
        """
        present = [rank for rank in self.voters if rank in ranks]
        if not present:
            return False
        if all(rank in ranks or rank in dead for rank in self.voters):
            return True
        if all(rank in self.fresh for rank in present):
            return False
        lowest = present[0] == self.voters[0]
        return 2 * len(present) + lowest > len(self.voters)

    def successor(
        self,
        counts: Mapping[int, Mapping[str, int]],
        dead: Collection[int],
        joining: Collection[int],
        leaving: Collection[int] = (),
    ) -> View:
        """Make the next view, of the members that stay, with their counts, and those that join."""
        starts: dict[str, int] = {}
        for uses in counts.values():
            for name, count in uses.items():
                starts[name] = max(count, starts.get(name, 0))
        joined = set(joining) - counts.keys()
        left = set(self.members) - counts.keys()
        unfenced = (set(self.unfenced) | (left & set(self.voters))) - set(dead) - joined
        # A rank that is out and does not know may act on the view before: who was no voter then
        # must not decide alone.
        voters = set(self.voters) - set(self.fresh) if unfenced else set(self.members)
        voters &= counts.keys()
        members, fresh = counts.keys() | joined, voters - set(self.voters)
        sets = joined, left, voters, fresh, unfenced, counts.keys() & set(leaving)
        changes = (tuple(sorted(ranks)) for ranks in sets)
        return View(self.number + 1, tuple(sorted(members)), starts, *changes)
