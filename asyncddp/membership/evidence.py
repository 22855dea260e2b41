"""Evidence that members have failed: known deaths, and suspicions reported by other ranks."""

from __future__ import annotations

from asyncddp.membership.view import View


class Evidence:
    """Evidence of failures that one rank has: dead ranks, and which ranks suspect which others.

    A certified death is a fact. A weak suspicion counts once more than half of the other members
    that are not dead report it, and only while the others could decide without the suspects.
    """

    def __init__(self, rank: int, view: View) -> None:
        self._rank, self._view = rank, view
        self.dead: set[int] = set()
        self.own: dict[int, str] = {}  # weak suspicions of this rank, with their reasons
        self.unanswered: set[int] = set()  # those of them that the rank's next message refutes
        self._reports: dict[int, set[int]] = {}  # reporters by suspected rank

    def __str__(self) -> str:
        suspects = ", ".join(map(str, sorted(self.own))) or "none"
        return f"(suspected: {suspects}; ended: {', '.join(map(str, sorted(self.dead))) or 'none'})"

    @property
    def relevant_dead(self) -> frozenset[int]:
        """Dead ranks that are members, or might act on an earlier view if they lived."""
        return frozenset(self.dead.intersection(self._view.members + self._view.unfenced))

    def certify(self, rank: int) -> bool:
        """Record that a rank acts no more; return whether that is news."""
        known = rank in self.dead or rank not in self._view.members + self._view.unfenced
        if not known:
            self.dead.add(rank)
            self.own.pop(rank, None)
            self.unanswered.discard(rank)
        return not known

    def report(self, reporter: int, suspect: int, *, withdrawn: bool = False) -> None:
        """Record a member's weak suspicion, or its withdrawal."""
        if suspect in self._view.members:
            reporters = self._reports.setdefault(suspect, set())
            (reporters.discard if withdrawn else reporters.add)(reporter)

    def suspect(self, rank: int, reason: str, *, until_it_answers: bool) -> bool:
        """Record a weak suspicion of this rank; return whether it is news."""
        if rank not in self._view.members or rank in self.dead or rank in self.own:
            return False
        self.own[rank] = reason
        if until_it_answers:
            self.unanswered.add(rank)
        self.report(self._rank, rank)
        return True

    def withdraw(self, rank: int) -> bool:
        """Withdraw a weak suspicion of this rank; return whether there was one."""
        self.unanswered.discard(rank)
        self.report(self._rank, rank, withdrawn=True)
        return self.own.pop(rank, None) is not None

    @property
    def accused(self) -> frozenset[int]:
        """Members that the next view leaves out."""
        dead = self.dead.intersection(self._view.members)
        living = set(self._view.members) - dead
        suspects = {rank for rank in living if self._is_outvoted(rank, living)}
        stays = self._view.is_quorum(living - suspects, dead)
        return frozenset(dead | suspects if stays else dead)

    def is_cut_off(self) -> bool:
        """Return whether the ranks that this rank does not suspect cannot decide anything."""
        trusted = set(self._view.members) - self.dead - self.own.keys()
        return not self._view.is_quorum(trusted, self.dead)

    def enter(self, view: View) -> None:
        """Go on with the next view; ranks that joined begin without evidence against them."""
        self._view = view
        self.dead -= set(view.joined)
        gone = self.own.keys() - (set(view.members) - set(view.joined))
        for rank in gone:
            del self.own[rank]
        self.unanswered -= gone
        self._reports = {rank: {self._rank} for rank in self.own}

    def _is_outvoted(self, rank: int, living: set[int]) -> bool:
        others = living - {rank}
        return 2 * len(others & self._reports.get(rank, set())) > len(others)
