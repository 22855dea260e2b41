"""How many slots large tensors go round in: what is tried, and what is chosen."""

import pytest

from asyncddp.shm.slot_count_tuner import FEW, MANY, SlotCountTuner


@pytest.mark.parametrize(("few", "many", "chosen"), [(1.0, 2.0, FEW), (2.0, 1.0, MANY)])
def test_the_faster_one_is_chosen_and_both_are_tried_again(few, many, chosen):
    """Slow copies of one tensor change nothing, and a tensor may have fewer chunks than slots."""
    cycle, seen = SlotCountTuner(), []
    for number in range(1100):
        slots = cycle.next()
        seen.append(slots)
        if cycle.tries:
            seconds = few if slots == FEW else many
            cycle.record(min(slots, 9), [seconds] * 8 + [100.0] * (8 if number < 2 else 1))
    assert seen[:6] == seen[512:518] == [FEW, MANY] * 3
    assert set(seen[6:512]) == set(seen[518:1024]) == {chosen}


def test_it_goes_on_where_nothing_was_timed():
    """A tensor that fails, or that its neighbours read in its own memory, is not timed."""
    cycle = SlotCountTuner()
    assert {cycle.next() for _ in range(6)} == {FEW, MANY}
    assert {cycle.next() for _ in range(100)} == {FEW}
