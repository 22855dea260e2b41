"""``LocalStepRandomBatchSampler``: a seed and a step give the batch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import asyncddp as bf
from tests.support.processes import run_to_end, warm_server


def sampler(samples=10, batch_size=3, base_seed=5, **options):
    return bf.LocalStepRandomBatchSampler(range(samples), batch_size, base_seed, **options)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("samples", "size"), [(10, 3), (12, 4), (5, 5), (7, 100), (1, 1)])
def test_a_round_has_every_sample_once(samples, size, drop_last):
    """All batches but the last are full; with drop_last all are."""
    if drop_last and size > samples:
        pytest.skip("no batch is full: refused, see below")
    chosen = sampler(samples, size, drop_last=drop_last)
    for _ in range(3):
        batches = list(chosen)
        assert len(batches) == len(chosen)
        assert {len(batch) for batch in batches[:-1]} <= {size}
        drawn = [index for batch in batches for index in batch]
        assert len(set(drawn)) == len(drawn)
        assert set(drawn) <= set(range(samples))
        rest = samples % size if drop_last else 0
        assert len(drawn) == samples - rest


def test_the_seed_is_the_written_one():
    """The permutation of base_seed + 10000 · rank + round, cut into batches in order."""
    chosen = sampler(base_seed=7, rank=2)
    for number in range(2):
        generator = torch.Generator().manual_seed(7 + 20000 + number)
        order = torch.randperm(10, generator=generator).tolist()
        assert list(chosen) == [order[:3], order[3:6], order[6:9], order[9:]]


def test_a_step_gives_the_batch_whatever_was_drawn_before():
    """``batch(step)`` has no memory, and draws nothing."""
    chosen = sampler()
    drawn = [batch for _ in range(3) for batch in chosen]
    other = sampler()
    for step in (11, 0, 5, 4, 11):
        assert other.batch(step) == drawn[step]
    assert other.local_step == 0


def test_seeds_ranks_and_rounds_differ():
    """No two of them draw the same order."""
    every = [sampler(50, 50, seed, rank=rank) for seed in (0, 1) for rank in (0, 1)]
    orders = [tuple(one.batch(step)) for one in every for step in (0, 2)]
    assert len(set(orders)) == len(orders)


@pytest.mark.launches
def test_every_process_draws_the_same():
    """Another interpreter gives the same batches, whatever torch's own generator did."""
    torch.manual_seed(3)
    code = (
        "import asyncddp as bf, torch\n"
        "torch.manual_seed(99); torch.rand(7)\n"
        "print([b for b in bf.LocalStepRandomBatchSampler(range(10), 3, 5, rank=1)])"
    )
    done = run_to_end(warm_server().command("-c", code))
    assert done.code == 0, done
    state = torch.get_rng_state()
    assert done.stdout.strip() == str(list(sampler(rank=1)))
    assert torch.equal(state, torch.get_rng_state()), "torch's own generator was touched"


def test_an_epoch_that_was_broken_off_is_continued():
    """The next ``for`` takes the rest of the round, the one after it the next round."""
    whole = [sampler().batch(step) for step in range(8)]
    chosen = sampler()
    for count, _ in enumerate(chosen, start=1):
        if count == 3:
            break
    assert chosen.local_step == 3
    assert list(chosen) == whole[3:4]
    assert list(chosen) == whole[4:8]


def test_resuming():
    """state_dict and load_state_dict go on in the middle of a round."""
    first = sampler(rank=1)
    drawn = [batch for _, batch in zip(range(6), [*first, *first], strict=False)]
    first.local_step = 6
    second = sampler(rank=1)
    second.load_state_dict(first.state_dict())
    assert second.local_step == 6
    assert [*drawn, *second] == [sampler(rank=1).batch(step) for step in range(8)]


def test_in_a_data_loader():
    """As ``batch_sampler``; ranks take batches of their own sizes."""
    data = torch.arange(20)

    def case():
        chosen = bf.LocalStepRandomBatchSampler(data, 4 + bf.rank(), base_seed=1)
        loader = DataLoader(data, batch_sampler=chosen)
        batches = [batch.tolist() for batch in loader]
        assert len(loader) == len(batches)
        return chosen.rank, batches[0], len(batches)

    with bf.local_world(3) as world:
        got = world.run(case)
    assert [rank for rank, _, _ in got] == [0, 1, 2]
    assert [count for _, _, count in got] == [5, 4, 4]
    assert len({tuple(batch[:4]) for _, batch, _ in got}) == 3


def test_the_rank_is_zero_outside_a_world():
    """``rank=None`` asks the context where there is one."""
    assert sampler().rank == 0
    assert list(sampler()) == list(sampler(rank=0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 0}, "argument dataset: expected at least one sample"),
        ({"batch_size": 0}, "argument batch_size: expected a whole number of at least 1, got 0"),
        (
            {"batch_size": 2.5},
            "argument batch_size: expected a whole number of at least 1, got 2.5",
        ),
        ({"base_seed": "x"}, "argument base_seed: expected a whole number, got 'x'"),
        ({"rank": -1}, "argument rank: expected a whole number of at least 0, got -1"),
        (
            {"batch_size": 11, "drop_last": True},
            "argument drop_last: with True, a round of 10 samples has no batch of batch_size=11; "
            "take drop_last=False or a batch_size of at most 10",
        ),
    ],
)
def test_values_that_cannot_be(options, words):
    """They are refused by the constructor, with what to do."""
    with pytest.raises(bf.ArgumentError, match=f"LocalStepRandomBatchSampler: {words}"):
        sampler(**options)


def test_steps_that_cannot_be():
    """Below zero, or no number."""
    chosen = sampler()
    with pytest.raises(bf.ArgumentError, match=r"argument step: .*at least 0, got -1"):
        chosen.batch(-1)
    with pytest.raises(bf.ArgumentError, match=r"argument local_step: .*at least 0, got None"):
        chosen.local_step = None


def test_states_of_other_samplers_are_refused():
    """A step of other batches is no step of these; the sampler stays as it was."""
    other = sampler(batch_size=4)
    other.local_step = 2
    chosen = sampler()
    with pytest.raises(bf.ArgumentError, match=r"expected batch_size=3 as here, got 4"):
        chosen.load_state_dict(other.state_dict())
    with pytest.raises(
        bf.ArgumentError, match=r"expected an entry 'local_step', got \['samples'\]"
    ):
        chosen.load_state_dict({"samples": 10})
    assert chosen.local_step == 0
