"""Load-balancing samplers: one step costs all ranks the same, and all agree on who has what."""

from __future__ import annotations

import random
from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader

import asyncddp as bf
from tests.support.processes import run_to_end, warm_server

LENGTHS = random.Random(4).sample(range(1000), 60)
RANKS = 4


def samplers(data=LENGTHS, ranks=RANKS, **options):
    return [
        bf.LoadBalancingDistributedSampler(data, int, ranks, rank, **options)
        for rank in range(ranks)
    ]


def steps(every):
    """What the ranks have in each step: tuples of indices."""
    return list(zip(*every, strict=True))


def halves(indices):
    """Batches of two."""
    return [indices[start : start + 2] for start in range(0, len(indices), 2)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("samples", [60, 58, 57, 5])
def test_a_step_has_neighbours_in_the_order_of_complexity(shuffle, samples):
    """Without noise the samples of a step follow each other when sorted, the last step's too."""
    data = LENGTHS[:samples]
    place = {index: at for at, index in enumerate(sorted(range(samples), key=data.__getitem__))}
    for chunk in steps(samplers(data, shuffle=shuffle)):
        first = place[chunk[0]]
        assert [place[index] for index in chunk] == list(range(first, first + RANKS))


def test_without_shuffling_steps_get_harder():
    """From simple to complex, the same in each epoch."""
    every = samplers(shuffle=False)
    before = steps(every)
    for sampler in every:
        sampler.set_epoch(3)
    assert steps(every) == before
    assert [LENGTHS[index] for index in before[0]] == sorted(LENGTHS)[:RANKS]
    assert [LENGTHS[index] for index in before[-1]] == sorted(LENGTHS)[-RANKS:]


@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
def test_an_epoch_and_a_seed_determine_the_order(level):
    """Equal ones give equal orders, whatever torch's own generator did; others differ."""
    torch.manual_seed(1)
    orders = {}
    for seed in (0, 1):
        for epoch in (0, 5):
            (one, *_) = every = samplers(seed=seed, random_level=level)
            for sampler in every:
                sampler.set_epoch(epoch)
            orders[seed, epoch] = steps(every)
            assert list(one) == list(one)
            torch.rand(3)
    assert len({str(order) for order in orders.values()}) == 4
    again = samplers(seed=1, random_level=level)
    assert steps(again) == orders[1, 0]
    for sampler in again:
        sampler.set_epoch(5)
    assert steps(again) == orders[1, 5]


@pytest.mark.launches
def test_every_process_draws_the_same():
    """Another interpreter divides the data alike."""
    code = (
        "import asyncddp as bf, torch\n"
        f"data = {LENGTHS}\n"
        "print(list(bf.LoadBalancingDistributedSampler(data, int, 4, 1, random_level=0.5)))"
    )
    done = run_to_end(warm_server().command("-c", code))
    assert done.code == 0, done
    assert done.stdout.strip() == str(list(samplers(random_level=0.5)[1]))


@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("samples", "ranks"), [(60, 4), (12, 3), (4, 4), (5, 1)])
def test_ranks_are_disjoint_where_chunks_come_out_even(samples, ranks, level):
    """Each sample is on exactly one rank."""
    drawn = [list(one) for one in samplers(LENGTHS[:samples], ranks, random_level=level)]
    assert sorted(chain(*drawn)) == list(range(samples))


@pytest.mark.parametrize(("samples", "ranks"), [(59, 4), (61, 4), (5, 2), (7, 4), (1, 3), (2, 5)])
def test_what_does_not_come_out_even(samples, ranks):
    """Ranks have equally many; every sample is there, some twice, or with drop_last none twice."""
    data = (LENGTHS * 2)[:samples]
    every = samplers(data, ranks)
    drawn = [list(one) for one in every]
    assert {len(one) for one in drawn} == {len(every[0])} == {-(-samples // ranks)}
    assert set(chain(*drawn)) == set(range(samples))
    if samples >= ranks:
        assert all(len(set(chunk)) == ranks for chunk in steps(every))
        every = samplers(data, ranks, drop_last=True)
        drawn = [*chain(*every)]
        assert len(every[0]) == samples // ranks
        assert len(set(drawn)) == len(drawn) == samples // ranks * ranks


def test_other_samples_are_dropped_in_other_epochs():
    """No sample is left out for ever, such as the most complex."""
    every, seen = samplers(LENGTHS[:7], drop_last=True), set()
    for epoch in range(20):
        for sampler in every:
            sampler.set_epoch(epoch)
            seen |= set(sampler)
    assert seen == set(range(7))


def test_noise_mixes_up_to_its_level():
    """In a step complexities differ by as much as neighbours' and the noise do, and no more."""
    gap = max(b - a for a, b in zip(sorted(LENGTHS), sorted(LENGTHS)[1:], strict=False))
    whole = max(LENGTHS) - min(LENGTHS)
    spreads = {}
    for level in (0.0, 0.1, 1.0):
        chunks = steps(samplers(random_level=level))
        found = [[LENGTHS[index] for index in chunk] for chunk in chunks]
        spreads[level] = max(max(one) - min(one) for one in found)
        assert spreads[level] <= (RANKS - 1) * gap + 2 * level * whole
    assert spreads[0.0] < spreads[0.1] < spreads[1.0]


def test_equals_are_drawn():
    """Samples of one complexity are not always on the same rank, nor always together."""
    (one, *_) = every = samplers([3] * 8, 2)
    orders = set()
    for epoch in range(6):
        for sampler in every:
            sampler.set_epoch(epoch)
        orders.add(tuple(sorted(one)))
        assert sorted(chain(*every)) == list(range(8))
    assert len(orders) > 3


def test_the_complexity_is_asked_once_a_sample():
    """In the constructor; fractions and tensors are numbers too."""
    asked = []

    def complexity(sample):
        asked.append(sample)
        return torch.tensor(sample / 2)

    sampler = bf.LoadBalancingDistributedSampler(
        LENGTHS[:6], complexity, num_replicas=1, shuffle=False
    )
    assert [LENGTHS[index] for index in sampler] == sorted(LENGTHS[:6])
    assert list(sampler) == list(sampler)
    assert asked == LENGTHS[:6]


def test_ranks_are_those_of_the_world():
    """``num_replicas`` and ``rank`` are asked of the world; outside of one there is one rank."""

    def case():
        sampler = bf.LoadBalancingDistributedSampler(LENGTHS, int)
        loader = DataLoader(torch.tensor(LENGTHS), sampler=sampler, batch_size=4)
        assert sum(map(len, loader)) == len(sampler)
        return sampler.rank, list(sampler)

    with bf.local_world(RANKS) as world:
        got = world.run(case)
    assert got == [(rank, list(one)) for rank, one in enumerate(samplers())]
    alone = bf.LoadBalancingDistributedSampler(LENGTHS, int)
    assert (alone.num_replicas, alone.rank, len(alone)) == (1, 0, 60)


def by_tokens(indices, most=1200):
    """Batches of as many samples as have so many tokens together."""
    batches, tokens = [[]], 0
    for index in indices:
        if batches[-1] and tokens + LENGTHS[index] > most:
            batches, tokens = [*batches, []], 0
        batches[-1].append(index)
        tokens += LENGTHS[index]
    return batches


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_have_equally_many_batches(drop_last):
    """The first are repeated, or the last left out; what is there is as ``batch_fn`` made it."""
    differed = False
    for epoch in range(8):
        every = samplers(random_level=1.0)
        batched = [
            bf.LoadBalancingDistributedBatchSampler(one, by_tokens, drop_last) for one in every
        ]
        for one in batched:
            one.set_epoch(epoch)
        made = [by_tokens(list(one)) for one in every]
        counts = [len(batches) for batches in made]
        count = min(counts) if drop_last else max(counts)
        differed |= min(counts) < max(counts)
        for one, batches in zip(batched, made, strict=True):
            assert len(one) == count
            assert list(one) == [*batches, *batches][:count]
    assert differed


def test_an_epoch_of_batches():
    """Another epoch gives other batches; in a loader there are as many as the length says."""
    sampler = bf.LoadBalancingDistributedBatchSampler(samplers()[1], halves)
    loader = DataLoader(torch.tensor(LENGTHS), batch_sampler=sampler)
    first = [batch.tolist() for batch in loader]
    sampler.set_epoch(1)
    second = [batch.tolist() for batch in loader]
    sampler.sampler.set_epoch(0)
    assert len(loader) == len(first) == len(second) == 8
    assert first != second
    assert [batch.tolist() for batch in loader] == first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_replicas": 0}, "argument num_replicas: .* of at least 1, got 0"),
        ({"rank": 4}, "argument rank: expected one of 4 ranks, 0 to 3, got 4"),
        ({"rank": -1}, "argument rank: .* of at least 0, got -1"),
        ({"seed": 1.5}, "argument seed: expected a whole number, got 1.5"),
        ({"random_level": 1.1}, "argument random_level: .* from 0 to 1, got 1.1"),
        ({"random_level": float("nan")}, "argument random_level: .* from 0 to 1, got nan"),
        ({"dataset": []}, "argument dataset: .* each of 4 ranks, got 0$"),
        (
            {"dataset": [1, 2, 3], "drop_last": True},
            "argument dataset: .* each of 4 ranks, got 3; take drop_last=False",
        ),
        ({"complexity_fn": lambda sample: None}, "complexity_fn: .* got None for sample 0"),
        ({"complexity_fn": float, "dataset": [1, "nan"]}, "complexity_fn: .* nan for sample 1"),
    ],
)
def test_values_that_cannot_be(options, words):
    """They are refused by the constructor."""
    given = {"dataset": LENGTHS, "complexity_fn": int, "num_replicas": 4, "rank": 1, **options}
    with pytest.raises(bf.ArgumentError, match=f"^LoadBalancingDistributedSampler: .*{words}"):
        bf.LoadBalancingDistributedSampler(**given)


def test_batches_that_cannot_be():
    """Another sampler, and a rank without a batch, which all ranks notice."""
    with pytest.raises(bf.ArgumentError, match=r"argument sampler: .* got RandomSampler"):
        bf.LoadBalancingDistributedBatchSampler(torch.utils.data.RandomSampler(LENGTHS), halves)
    (first, *_) = samplers(LENGTHS[:RANKS])

    def only_small(indices):
        return [[index] for index in indices if LENGTHS[index] != max(LENGTHS[:RANKS])]

    batched = bf.LoadBalancingDistributedBatchSampler(first, only_small)
    with pytest.raises(bf.ArgumentError, match=r"batch_fn: .* got none for rank 3"):
        len(batched)
