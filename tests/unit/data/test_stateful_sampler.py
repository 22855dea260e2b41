"""``StatefulDistributedSampler``: shares of an epoch, which other ranks can finish."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

import asyncddp as bf
from asyncddp.data import partition


def samplers(samples, ranks, **options):
    return [bf.StatefulDistributedSampler(samples, ranks, rank, **options) for rank in range(ranks)]


def take(sampler, count):
    """Take the first indices of an iterator, and break it off."""
    return [index for _, index in zip(range(count), sampler, strict=False)]


@given(
    samples=st.integers(1, 40),
    ranks=st.integers(1, 6),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_indices_are_those_of_torch(samples, ranks, shuffle, drop_last, epoch):
    """Seed + epoch, stride n, padding and drop_last as in ``DistributedSampler``."""
    if drop_last and samples < ranks:
        return
    options = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last}
    for rank, mine in enumerate(samplers(samples, ranks, **options)):
        theirs = DistributedSampler(range(samples), ranks, rank, **options)
        theirs.set_epoch(epoch)
        mine.set_epoch(epoch)
        assert len(mine) == len(theirs)
        assert list(mine) == list(theirs)
        assert mine.epoch == epoch + 1


@settings(deadline=None)
@given(
    samples=st.integers(1, 60),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 8)), min_size=1, max_size=5),
    drop_last=st.booleans(),
)
def test_every_sample_once_over_ranks_interrupts_and_other_ranks(samples, worlds, drop_last):
    """Worlds of several sizes share an epoch, one after the other: each sample is dealt once.

    With drop_last fewer samples than there are ranks are left; else fewer than these come twice.
    """
    drop_last &= samples >= max(ranks for ranks, _ in worlds)
    seen, state = [], None
    for place, (ranks, steps) in enumerate(worlds):
        every = samplers(samples, ranks, drop_last=drop_last, seed=3)
        for sampler in every:
            if state is not None:
                sampler.load_state_dict(state)
        if place < len(worlds) - 1:
            dealt = [take(sampler, steps) for sampler in every]
            if every[0].epoch:  # the epoch has ended within these steps
                steps = None
        else:
            dealt, steps = [list(sampler) for sampler in every], None
        assert len({len(one) for one in dealt}) == 1, "all ranks make as many steps"
        seen += [index for row in zip(*dealt, strict=True) for index in row]
        states = [sampler.state_dict() for sampler in every]
        assert all(one == states[0] for one in states)
        state = states[0]
        if steps is None:
            break
    assert state["epoch"] == 1
    if drop_last:
        assert len(set(seen)) == len(seen)
        assert samples - len(seen) < ranks
    else:
        assert set(seen) == set(range(samples))
        assert len(seen) - samples < max(ranks for ranks, _ in worlds)


@given(
    samples=st.integers(1, 40),
    ranks=st.integers(1, 5),
    steps=st.integers(0, 30),
    parts=st.booleans(),
)
def test_as_many_ranks_go_on_exactly(samples, ranks, steps, parts):
    """The indices after the resume are those that an uninterrupted epoch would have given."""
    options = {}
    if parts and samples >= ranks:
        options = {"partition": partition.dirichlet(np.arange(samples) % 2, ranks, 0.5)}
    for one, other, whole in zip(
        *(samplers(samples, ranks, **options) for _ in range(3)), strict=True
    ):
        begun = take(one, min(steps, len(one) - 1))
        other.load_state_dict(one.state_dict())
        assert begun + list(other) == list(whole)
        assert list(other) == list(whole), "and the epochs after it"


def test_the_epoch_advances_at_the_end_only():
    """An iterator that is broken off leaves it, and the next one begins where that one did."""
    (sampler,) = samplers(10, 1)
    first = list(sampler)
    second = take(sampler, 4)
    assert sampler.state_dict()["consumed"] == 4
    assert list(sampler)[:4] == second
    assert sampler.epoch == 2
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_set_epoch_of_the_present_epoch_keeps_the_place():
    """A loop that calls it before each epoch, by habit, does not lose what was resumed."""
    one, other = samplers(10, 1) + samplers(10, 1)
    begun = take(one, 7)
    other.load_state_dict(one.state_dict())
    other.set_epoch(0)
    assert sorted(begun + list(other)) == list(range(10))


def test_ranks_with_data_of_their_own():
    """Each goes through its own part, as many steps as the largest or the smallest has."""
    parts = [np.array([7, 8, 9]), np.array([0, 1]), np.array([3, 4, 5, 6])]
    whole = samplers(10, 3, partition=parts)
    assert [len(one) for one in whole] == [4, 4, 4]
    for sampler, part in zip(whole, parts, strict=True):
        drawn = list(sampler)
        assert set(drawn) == set(part.tolist())
        assert sorted(drawn[: len(part)]) == part.tolist()
        assert drawn != list(sampler), "the next epoch has another order"
    for sampler, part in zip(
        samplers(10, 3, partition=parts, drop_last=True, shuffle=False), parts, strict=True
    ):
        assert list(sampler) == part.tolist()[:2]


def test_ranks_of_the_world():
    """By default a rank's own share; alone before ``init()``."""
    with bf.local_world(3) as world:
        dealt = world.run(lambda: list(bf.StatefulDistributedSampler([*"abcdef"], seed=1)))
    assert sorted(index for one in dealt for index in one) == list(range(6))
    assert sorted(bf.StatefulDistributedSampler(6)) == list(range(6))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dataset": "no"[:0]}, r"argument dataset: .*a sample for each of 2 ranks, got 0$"),
        ({"dataset": 1, "drop_last": True}, r"argument dataset: .*got 1; take drop_last=False"),
        ({"dataset": 1.5}, "argument dataset: expected a whole number of at least 0, got 1.5"),
        ({"rank": 2}, "argument rank: expected one of 2 ranks, 0 to 1, got 2"),
        ({"seed": None}, "argument seed: expected a whole number, got None"),
        (
            {"partition": [[0]]},
            r"partition: .* each of 2 ranks.*partition.uniform\(6, 2\).*got 1 p",
        ),
        ({"partition": [[0], [6]]}, r"indices from 0 to 5 .* got 2 parts, array\(\[6\]\) among"),
        ({"partition": [[0], []]}, r"indices from 0 to 5 .*array\(\[\], dtype=float64\) among"),
    ],
)
def test_values_that_cannot_be(given, words):
    """They are refused by the constructor, with what to do."""
    with pytest.raises(bf.ArgumentError, match=f"^StatefulDistributedSampler: .*{words}"):
        bf.StatefulDistributedSampler(**{"dataset": 6, "num_replicas": 2, "rank": 0, **given})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 9}, "expected samples=9 as here, got 8, which gives another order"),
        ({"seed": 1}, r"expected seed=1 as here, got 0.*or begin an epoch by set_epoch"),
        ({"shuffle": False}, "expected shuffle=False as here, got True"),
        ({"partition": [[0], [1]]}, "expected parts=2 as here, got 0"),
    ],
)
def test_states_of_another_order_are_refused(options, words):
    """Also parts of ranks for another number of them; the sampler stays as it was."""
    state = samplers(8, 2)[0].state_dict()
    sampler = samplers(**{"samples": 8, "ranks": 2, **options})[0]
    with pytest.raises(bf.ArgumentError, match=rf"Sampler.load_state_dict: {words}"):
        sampler.load_state_dict({**state, "epoch": 3})
    with pytest.raises(bf.ArgumentError, match=r"expected an entry 'consumed', got \['epoch'\]"):
        sampler.load_state_dict({"epoch": 3})
    with pytest.raises(bf.ArgumentError, match=r"set_epoch: argument epoch: .*at least 0, got -1"):
        sampler.set_epoch(-1)
    assert sampler.epoch == 0
