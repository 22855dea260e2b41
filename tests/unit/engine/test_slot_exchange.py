"""A collective in slots knows who takes part already and who is late."""

from __future__ import annotations

from asyncddp.engine.messages import COLLECTIVE, MatchKey
from asyncddp.engine.slot_exchange import SlotsCondition
from asyncddp.shm.arena import InProcessArena
from asyncddp.shm.collective_slots import CollectiveSlots, SlotMemory


def test_a_rank_that_waits_knows_who_waits_with_it_and_for_whom():
    """So that one rank warns for all of them."""
    arena = InProcessArena()
    handles = [SlotMemory.allocate(arena, ranks=4) for _ in range(4)]
    memory = SlotMemory.map(arena, [0] * 4, handles)
    ranks = [CollectiveSlots(memory, rank) for rank in range(4)]
    key = MatchKey(COLLECTIVE, 0)
    ranks[0].post(0, 7)
    ranks[2].post(0, 7)
    waiting = SlotsCondition(ranks[2], key, 7)
    assert waiting.joined() == [0]
    assert waiting.missing() == [(1, key), (3, key)]
    assert not waiting.done()
