"""Views of sharded replicas: one verdict for a replica, and one first round in all groups."""

from __future__ import annotations

from collections import deque

import pytest

from asyncddp.engine.membership_changes import ENDED, MembershipChanges
from asyncddp.engine.replica_agreement import ReplicaAgreement
from asyncddp.errors import IsolatedError
from asyncddp.membership import View


class Wire(deque):
    """Messages under way between ranks, in their order."""

    def sender(self, rank):
        class Sends:
            put = staticmethod(lambda peer, message: self.append((rank, peer, message)))

        return Sends()


class Replicas:
    """Ranks of replicas of two: ranks 2 r and 2 r + 1 are replica r, in columns 0 and 1."""

    def __init__(self, replicas, uses):
        self.size, self.wire = 2 * replicas, Wire()
        units = [(2 * unit, 2 * unit + 1) for unit in range(replicas)]
        self.ranks, self.units, self.columns = {}, {}, {}
        for rank in range(self.size):
            facts = rank, self.size, lambda rank=rank: self.units[rank].promised()
            self.ranks[rank] = ranks = MembershipChanges(*facts, self.wire.sender(rank))
            names = "mesh: ", f"mesh, column {rank % 2}: "
            self.units[rank] = unit = ReplicaAgreement(ranks, units, rank // 2, names)
            unit.count = lambda rank=rank: uses[rank]
            sends = self.wire.sender(rank)
            self.columns[rank] = MembershipChanges(rank // 2, replicas, dict, sends, agreement=unit)

    def lose(self, *dead):
        """Let the others agree on a view without these ranks."""
        living = [rank for rank in self.ranks if rank not in dead]
        for rank in living:
            for one in dead:
                self.ranks[rank].suspect(one, "it was killed", certified=True)
        while True:
            for rank in living:
                view = self.ranks[rank].progress()
                if view is not None:
                    self.units[rank].learn(view)
                    self.ranks[rank].enter()
            if not self.wire:
                return
            sender, peer, message = self.wire.popleft()
            if sender in living and peer in living:
                self.ranks[peer].receive(sender, message)


def test_a_view_begins_with_the_same_round_in_all_columns():
    """Where the columns are rounds apart, the furthest of all of them counts."""
    uses = {rank: {"x": 7, ENDED: 3} for rank in range(6)}
    uses[4] = {"x": 9, ENDED: 4}  # in column 0
    replicas = Replicas(3, uses)
    replicas.lose(3)
    for rank in (0, 1, 4, 5):
        column = replicas.columns[rank]
        assert column.frozen  # nothing begins before the view does
        view = column.progress()
        assert (view.members, view.left, view.starts["x"]) == ((0, 2), (1,), 9)
        assert view.starts[ENDED] == (4 if rank % 2 == 0 else 3)  # what ended is a column's affair
        column.enter()
        assert not column.frozen
        assert column.view_at("x", 8).members == (0, 1, 2)
        assert column.view_at("x", 9).members == (0, 2)


def test_the_rest_of_a_replica_that_ends_later_changes_no_column():
    """Its column has left it out with the first of its ranks, and interrupts nothing again."""
    replicas = Replicas(3, {rank: {"x": 1} for rank in range(6)})
    replicas.lose(3)
    for rank in (0, 1, 4, 5):
        replicas.columns[rank].progress()
        replicas.columns[rank].enter()
    for rank in (0, 1, 4, 5):
        replicas.ranks[rank].suspect(2, "it was killed", certified=True)
        replicas.units[rank].promised()
        assert not replicas.columns[rank].loses
    replicas.lose(2, 3)
    for rank in (0, 1, 4, 5):
        view = replicas.columns[rank].progress()
        assert (view.number, view.members, view.left) == (2, (0, 2), ())
        assert replicas.columns[rank].view.number == 1


def test_a_rank_whose_replica_has_lost_another_one_is_isolated():
    """It must not go on in its column."""
    replicas = Replicas(2, {rank: {"x": 1} for rank in range(4)})
    replicas.lose(3)
    with pytest.raises(IsolatedError, match="view 1 leaves out this rank's replica"):
        replicas.columns[2].progress()


def test_views_that_are_waiting_begin_one_after_the_other():
    """Rounds between two losses belong to the view between them."""
    replicas = Replicas(3, {rank: {"x": 1} for rank in range(6)})
    unit, column = replicas.units[0], replicas.columns[0]
    members = tuple(range(6))
    for number, left in enumerate((3, 5), start=1):
        members = tuple(rank for rank in members if rank != left)
        unit.learn(View(number, members, {"mesh: x": 10 * number}))
    seen = []
    while column.frozen:
        seen.append(column.progress().members)
        column.enter()
    assert seen == [(0, 2), (0,)]
    assert [column.view_at("x", number).members for number in (9, 10, 20)] == [
        (0, 1, 2), (0, 2), (0,)
    ]  # fmt: skip
