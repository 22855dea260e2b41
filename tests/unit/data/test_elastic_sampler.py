"""An epoch whose ranks die, leave or come back is drawn by those that are there, once."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf

RANKS, SAMPLES = 4, 41


class DiesError(Exception):
    """End of a rank in the middle of its epoch."""


def epoch_of(drawn, deaths, samples=SAMPLES, **options):
    """Draw an epoch in step with the others, and end where it is this rank's turn to die."""
    rank = bf.rank()
    drawn[rank] = []
    sampler = bf.ElasticSampler(samples, **options)
    for number, index in enumerate(sampler):
        if deaths.get(rank) == number:
            raise DiesError  # with this index in hand
        drawn[rank].append(index)
        bf.allreduce(torch.ones(1))
    return sampler.epoch, bf.size()


def drawn_by_ranks(deaths, **options):
    """What each rank has drawn and trained on, and what the survivors have returned."""
    drawn, ended = {}, {}

    def body():
        ended[bf.rank()] = epoch_of(drawn, deaths, **options)

    with (
        pytest.raises(bf.RankError, match="DiesError"),
        bf.local_world(RANKS, elastic=True, timeout=20) as world,
    ):
        world.run(body)
    return drawn, ended


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"seed": 5}])
@pytest.mark.parametrize("deaths", [{2: 0}, {0: 3}, {1: 7}, {3: 2, 1: 6}], ids=str)
def test_survivors_draw_what_the_dead_have_not_drawn(deaths, options):
    """Each index is in one rank's hands, but for the last row; all end after equally many."""
    drawn, ended = drawn_by_ranks(deaths, **options)
    living = sorted(set(range(RANKS)) - set(deaths))
    assert ended == dict.fromkeys(living, (1, len(living)))
    lengths = {len(drawn[rank]) for rank in living}
    assert len(lengths) == 1, drawn
    every = [index for indices in drawn.values() for index in indices]
    missing = set(range(SAMPLES)) - set(every)
    assert len(missing) <= len(deaths)  # the batch in hand of each
    twice = len(every) - len(set(every))
    assert twice < len(living) + len(deaths), (twice, drawn)


def test_without_a_death_an_epoch_is_that_of_the_stateful_sampler():
    """Index by index, over two epochs."""

    def draw(kind):
        sampler = kind(SAMPLES, seed=3)
        return [list(sampler), list(sampler)], len(sampler)

    with bf.local_world(RANKS, elastic=True) as world:
        assert world.run(draw, bf.ElasticSampler) == world.run(draw, bf.StatefulDistributedSampler)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_epoch_is_resumed_on_another_number_of_ranks(ranks):
    """What was left is drawn, by equally many draws of all."""

    def begin():
        sampler = bf.ElasticSampler(SAMPLES, seed=1)
        drawn = [index for _, index in zip(range(4), sampler, strict=False)]
        state = sampler.state_dict()
        assert (sampler.num_replicas, sampler.rank) == (RANKS, bf.rank())
        assert state["consumed"] == 4 * RANKS
        return drawn, state

    def go_on(state):
        sampler = bf.ElasticSampler(SAMPLES, seed=1)
        sampler.load_state_dict(state)
        return list(sampler), sampler.epoch

    with bf.local_world(RANKS) as world:
        first = world.run(begin)
    with bf.local_world(ranks) as world:
        rest = world.run(go_on, first[0][1])
    assert {epoch for _, epoch in rest} == {1}
    assert len({len(indices) for indices, _ in rest}) == 1
    every = [index for indices, _ in (*first, *rest) for index in indices]
    assert set(every) == set(range(SAMPLES))
    assert len(every) - SAMPLES < ranks


def test_a_state_of_another_sampler_or_order_is_refused():
    """Before anything is changed."""

    def load():
        sampler = bf.ElasticSampler(SAMPLES)
        with pytest.raises(bf.ArgumentError, match="expected the state of an ElasticSampler"):
            sampler.load_state_dict(bf.StatefulDistributedSampler(SAMPLES).state_dict())
        with pytest.raises(bf.ArgumentError, match=r"got \[\[1\]\]"):
            sampler.load_state_dict({**sampler.state_dict(), "history": [[1]]})
        other = bf.ElasticSampler(SAMPLES, seed=1).state_dict()
        with pytest.raises(bf.ArgumentError, match="expected seed=0"):
            sampler.load_state_dict(other)
        return len(list(sampler))

    with bf.local_world(2) as world:
        assert world.run(load) == [21, 21]
