"""``join``: unequal numbers of batches, by a reference in which weights of those done move."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS
from asyncddp.algorithms.method_traits import JoinedRanks
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.uneven_inputs import renormalise
from tests.conformance.join_formulas import OPTIONS, JoinedFormula
from tests.conformance.join_reference import (
    BATCHES,
    LR,
    MIXING,
    MOMENTUM,
    Reference,
    Two,
    check,
    joined,
    loss_of,
    made,
    moved,
    starts,
    train_epoch,
)
from tests.support import LoopbackWorld, on
from tests.support.methods import EACH_STEP, every_step, one_of_each_kind

FAMILIES = {
    "ring": topology.ring,
    "exponential_two": topology.exponential_two,
    "one_peer": topology.one_peer_exponential,
}
ONE_SIDED = tuple(name for name in ALGORITHMS if ALGORITHMS[name].how[0].one_sided)
four_ranks = on("loopback-4", "shared_memory-4")


@four_ranks
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", MIXING)
def test_neighbours_take_over_the_weights_of_those_who_are_done(world, method, family):
    """X+ = W' X − U, or W' (X − U); two epochs, in which ranks are done in opposite orders."""
    graph = FAMILIES[family](4)
    epochs = [BATCHES, BATCHES[::-1]]
    got = world.run(joined, method, epochs, topology=graph)
    reference = Reference(method, graph, 4)
    for batches in epochs:
        reference.epoch(batches)
    check(got, reference)


@four_ranks
@pytest.mark.parametrize("method", [*MIXING, "gradient_allreduce"])
def test_global_averages_are_over_those_who_train(world, method):
    """Divided by their number; with gradients, the model of the last is everybody's at the end."""
    options = {} if method == "gradient_allreduce" else {"communication": "allreduce"}
    epochs = [BATCHES, BATCHES[::-1]]
    got = world.run(joined, method, epochs, **options)
    reference = Reference(method, None, 4)
    for batches in epochs:
        reference.epoch(batches)
    check(got, reference)
    if method == "gradient_allreduce":
        assert all(np.array_equal(got[0][0], x) for x, _ in got)


@four_ranks
@pytest.mark.parametrize("method", MIXING)
def test_local_steps_between_averagings(world, method):
    """Averaging in every third step; the count of passes goes on as on the ranks that were last."""
    graph = topology.one_peer_exponential(4)
    epochs = [(2, 7, 4, 8), (5, 1, 9, 0)]
    got = world.run(joined, method, epochs, topology=graph, num_steps_per_communication=3)
    reference = Reference(method, graph, 4, every=3)
    for batches in epochs:
        reference.epoch(batches)
    check(got, reference)


def without(method, batches, **options):
    model, optimizer = made(method, **options)
    train_epoch(model, optimizer, batches)
    return model.vector(), optimizer.counters


@four_ranks
@pytest.mark.parametrize("method", [*MIXING, "gradient_allreduce"])
def test_where_all_are_done_at_once_nothing_changes(world, method):
    """Equal numbers of batches: bit for bit what training without the block gives."""
    options = {} if method == "gradient_allreduce" else {"num_steps_per_communication": 2}
    got = world.run(joined, method, [(5,) * 4], **options)
    plain = world.run(without, method, 5, **options)
    assert all(np.array_equal(one, other) for (one, _), (other, _) in zip(got, plain, strict=True))
    assert [c for _, c in got] == [c for _, c in plain]


@four_ranks
@pytest.mark.parametrize("method", [*MIXING, "gradient_allreduce"])
@pytest.mark.parametrize("batches", [(0, 4, 4, 2), (0, 0, 6, 0), (0, 0, 0, 0)])
def test_ranks_without_a_single_batch(world, method, batches):
    """None, all but one, all: whoever has batches trains on them."""
    graph = None if method == "gradient_allreduce" else topology.ring(4)
    got = world.run(joined, method, [batches], topology=graph)
    check(got, Reference(method, graph, 4).epoch(batches))


def with_large_buckets(method):
    """No gradient, a value for each rank: 1.5 MB that travel in pieces; two epochs."""
    model = torch.nn.Linear(400, 500, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 2.0 ** bf.rank())
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    graph = topology.one_peer_exponential(bf.size())
    optimizer = bf.DistributedOptimizer(plain, model, method, topology=graph, broadcast=False)
    for batches in ((4, 6, 1, 5), (5, 1, 6, 4)):
        with bf.join(optimizer):
            for _ in range(batches[bf.rank()]):
                model(torch.ones(1, 400, dtype=torch.float64)).sum().backward()
                optimizer.step()
    return sorted(set(model.weight.detach().view(-1).tolist()))


@four_ranks
@pytest.mark.parametrize("method", MIXING)
def test_large_buckets(world, method):
    """The recursion X+ = W' X, exactly: the weights are halves."""
    x = 2.0 ** np.arange(4)
    rounds = 0
    for batches in ((4, 6, 1, 5), (5, 1, 6, 4)):
        for step in range(max(batches)):
            w = topology.mixing_matrix(topology.one_peer_exponential(4), rounds)
            x = moved(w, [rank for rank in range(4) if step < batches[rank]]) @ x
            rounds += 1
    assert world.run(with_large_buckets, method) == [[value] for value in x]


# what else users do


@pytest.mark.parametrize("method", MIXING)
def test_the_average_of_the_last(method):
    """broadcast_last: the mean over the ranks that trained last, on all ranks, bit for bit."""
    batches = (2, 5, 5, 3)
    got = LoopbackWorld(4).run(
        joined, method, [batches], broadcast_last=True, topology=topology.ring(4)
    )
    reference = Reference(method, topology.ring(4), 4).epoch(batches)
    reference.x[:] = reference.x[1:3].mean(axis=0)
    check(got, reference)
    assert all(np.array_equal(got[0][0], x) for x, _ in got)


def by_hand(batches):
    """The ring's weights, given by hand in each round."""
    model, optimizer = made("adapt_then_combine", topology=topology.complete(bf.size()))
    near = [(bf.rank() + 1) % 4, (bf.rank() - 1) % 4]
    optimizer.self_weight, optimizer.src_weights = 0.5, dict.fromkeys(near, 0.25)
    optimizer.dst_weights = near
    with bf.join(optimizer):
        train_epoch(model, optimizer, batches[bf.rank()])
    return model.vector(), optimizer.counters


def test_weights_set_by_hand_move_too():
    """The rule is the same, whoever gave the weights."""
    ring = topology.ring(4)
    for i, j, edge in ring.edges(data=True):
        edge["weight"] = 0.5 if i == j else 0.25
    reference = Reference("adapt_then_combine", ring, 4).epoch(BATCHES)
    check(LoopbackWorld(4).run(by_hand, BATCHES), reference)


def test_an_update_in_backward():
    """Buckets that leave while the backward pass goes on."""
    graph = topology.one_peer_exponential(4)
    options = {"topology": graph, "update_in_backward": True}
    got = LoopbackWorld(4).run(joined, "adapt_then_combine", [BATCHES], **options)
    check(got, Reference("adapt_then_combine", graph, 4).epoch(BATCHES))


@pytest.mark.parametrize("method", [*MIXING, "gradient_allreduce"])
def test_closures(method):
    """step(closure), whose loss is averaged over those who train where gradients are."""

    def case():
        model, optimizer = made(method)
        losses = []
        with bf.join(optimizer):
            for step in range(BATCHES[bf.rank()]):

                def closure(step=step):
                    optimizer.zero_grad()
                    loss = loss_of(model, step)
                    loss.backward()
                    return loss

                losses.append(float(optimizer.step(closure).detach()))
        return (model.vector(), optimizer.counters), losses

    graph = None if method == "gradient_allreduce" else topology.exponential_two(4)
    got = LoopbackWorld(4).run(case)
    check([one for one, _ in got], Reference(method, graph, 4).epoch(BATCHES))
    if graph is None:
        for rank, (_, losses) in enumerate(got):
            assert losses == got[3][1][: BATCHES[rank]]


def test_a_forward_pass_that_no_step_follows():
    """A last look in training mode begins a round, which is taken at the end of the block."""

    def case():
        model, optimizer = made("adapt_with_combine", topology=topology.ring(4))
        with bf.join(optimizer):
            train_epoch(model, optimizer, 1 + bf.rank())
            loss_of(model, 0)
        with bf.join(optimizer):
            train_epoch(model, optimizer, 4 - bf.rank())
        return optimizer.counters

    assert LoopbackWorld(4).run(case) == [{"round": 9, "passes": 0}] * 4


def test_a_backward_pass_that_no_step_follows():
    """The same where the update is made in backward."""

    def case():
        model, optimizer = made(
            "adapt_then_combine", topology=topology.ring(4), update_in_backward=True
        )
        for batches in (1 + bf.rank(), 4 - bf.rank()):
            with bf.join(optimizer):
                train_epoch(model, optimizer, batches)
                optimizer.zero_grad()
                loss_of(model, 0).backward()
        return optimizer.counters

    assert LoopbackWorld(4).run(case) == [{"round": 10, "passes": 0}] * 4


def two_optimizers(batches):
    """Two models in one loop, one of which averages in every second step."""
    first, one = made("adapt_with_combine", topology=topology.ring(bf.size()))
    second, other = made("gradient_allreduce")
    with bf.join(one, other):
        for step in range(batches[bf.rank()]):
            for model, optimizer in ((first, one), (second, other)):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
    return (first.vector(), one.counters), (second.vector(), other.counters)


@four_ranks
def test_several_optimizers(world):
    """A rank that is done knows whose round it is."""
    got = world.run(two_optimizers, BATCHES)
    ring = topology.ring(4)
    check([one for one, _ in got], Reference("adapt_with_combine", ring, 4).epoch(BATCHES))
    check([other for _, other in got], Reference("gradient_allreduce", None, 4).epoch(BATCHES))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("adapt_then_combine", {"communication": "empty"}),
        *((n, EACH_STEP.get(n, {})) for n in ONE_SIDED),
    ],
    ids=["empty", *ONE_SIDED],
)
def test_where_nobody_waits_they_only_end_together(method, options):
    """``empty``, and methods on windows: none is held up, and none leaves before the last."""
    ends = []

    def case():
        model, optimizer = made(method, **options)
        with bf.join(optimizer):
            train_epoch(model, optimizer, 3 * bf.rank())
            ends.append("last step")
        ends.append("out")
        with bf.join(optimizer, broadcast_last=True):
            train_epoch(model, optimizer, 4 - bf.rank())
        return optimizer.round, model.vector()

    got = LoopbackWorld(3).run(case)
    assert ends == ["last step"] * 3 + ["out"] * 3
    assert [count for count, _ in got] == ([0] * 3 if "communication" in options else [4, 6, 8])
    assert all(np.array_equal(got[0][1], x) for _, x in got)


@pytest.mark.parametrize("method", [*MIXING, "gradient_allreduce"])
def test_one_rank(method):
    """n = 1: what plain training gives; no message, no hook."""

    def case():
        model, optimizer = made(method)
        with bf.join(optimizer, broadcast_last=True):
            assert not optimizer._optimizer_step_post_hooks
            train_epoch(model, optimizer, 4)
        plain = Two(starts(1, alike=True)[0])
        train_epoch(plain, torch.optim.SGD(plain.parameters(), lr=LR, momentum=MOMENTUM), 4)
        return np.array_equal(model.vector(), plain.vector())

    assert LoopbackWorld(1).run(case) == [True]


def test_outside_of_the_block_nothing_is_left_of_it():
    """Neither hook nor coordinator stays, after its end or an exception; another can follow."""

    def case():
        model, optimizer = made("adapt_then_combine")

        def broken_off():
            with bf.join(optimizer):
                train_epoch(model, optimizer, 2)
                raise KeyError("the data is gone")

        with pytest.raises(KeyError, match="the data is gone"):
            broken_off()
        seen = [optimizer._averager.join_coordinator, dict(optimizer._optimizer_step_post_hooks)]
        with bf.join(optimizer):
            train_epoch(model, optimizer, 1 + bf.rank())
        seen += [optimizer._averager.join_coordinator, dict(optimizer._optimizer_step_post_hooks)]
        return seen, optimizer.round

    assert LoopbackWorld(3).run(case) == [([None, {}, None, {}], 5)] * 3


# weights that move


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n", [2, 5, 8])
def test_rows_stay_stochastic(family, n):
    """Rows of W' sum to one for every set of ranks; columns do where W is symmetric."""
    schedule = topology.as_schedule(FAMILIES[family](n))
    random = np.random.default_rng(n)
    for number in range(3):
        training = sorted(random.choice(n, size=1 + number % n, replace=False).tolist())
        w = topology.mixing_matrix(schedule, number)
        found = np.eye(n)
        for i in training:
            near = schedule.neighbors(i, number)
            row = renormalise(
                WeightRow(near.self_weight, near.src_weights, dict.fromkeys(near.dst_ranks, 1.0)),
                training,
            )
            assert set(row.sources) | set(row.targets) <= set(training)
            found[i] = 0.0
            found[i, [i, *row.sources]] = [row.self_weight, *map(row.src_weights.get, row.sources)]
        np.testing.assert_allclose(found, moved(w, training), rtol=0, atol=1e-15)
        np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=0, atol=1e-14)
        if np.array_equal(w, w.T):
            np.testing.assert_allclose(found.sum(axis=0), 1.0, rtol=0, atol=1e-14)


@on("loopback-4")
def test_what_ranks_know_of_each_other_stays_right(world):
    """Copies, replicas, trackers, relayed sums and outer models: two epochs, by the formulas."""
    for method, options in OPTIONS.items():
        graph = (
            None if ALGORITHMS[method].joined_ranks is JoinedRanks.FOLLOW else near_graph(method)
        )
        options = {**every_step(method), **options, "topology": graph}
        reference = JoinedFormula(method, graph, 4)
        for batches in (BATCHES, BATCHES[::-1]):
            reference.epoch(batches)
        check(world.run(joined, method, [BATCHES, BATCHES[::-1]], **options), reference)


def near_graph(method):
    return topology.tree(4) if method == "relay_sgd" else topology.ring(4)


def kept_after_a_block(method):
    """What a rank keeps for its parameters at the end, by name, as a checkpoint has it."""
    model, optimizer = made(method, topology=topology.ring(bf.size()), compression="bf16")
    with bf.join(optimizer):
        train_epoch(model, optimizer, BATCHES[bf.rank()])
    return optimizer.state_dict()["asyncddp"]["parameters"]


@pytest.mark.parametrize(
    ("method", "pairs"),
    [
        ("choco_sgd", {"public copy": "mixed public copies"}),
        (
            "beer",
            {"public model": "mixed public models", "public tracker": "mixed public trackers"},
        ),
    ],
)
def test_what_is_saved_after_a_block_is_that_of_all_ranks(method, pairs):
    """Sums of public copies have those of ranks that were done, as soon as the block is over."""
    got = LoopbackWorld(4).run(kept_after_a_block, method)
    w = topology.mixing_matrix(topology.ring(4), 0)
    for name in got[0]:
        for public, mixed in pairs.items():
            copies, sums = (np.stack([one[name][key] for one in got]) for key in (public, mixed))
            np.testing.assert_allclose(sums, w @ copies, rtol=0, atol=1e-12)


def matrices_in_blocks():
    """Two blocks of gossip without gradients; the mean before and after, and the directions."""
    generator = torch.Generator().manual_seed(bf.rank())
    model = torch.nn.Linear(6, 6, bias=False, dtype=torch.float64)
    model.weight.data = torch.randn((6, 6), generator=generator, dtype=torch.float64)
    start = model.weight.detach().clone()
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    ring = topology.ring(bf.size())
    optimizer = bf.DistributedOptimizer(
        plain, model, "power_gossip", topology=ring, broadcast=False
    )
    for batches in (BATCHES, BATCHES[::-1]):
        with bf.join(optimizer):
            for _ in range(batches[bf.rank()]):
                optimizer.step()
    optimizer.step()  # with directions of all ranks again
    return start, model.weight.detach().clone(), optimizer._averager.buckets[0].vectors


def test_directions_of_edges_stay_those_of_both_ends():
    """The mean of matrices is kept, and ranks that were done know what their neighbours know."""
    got = LoopbackWorld(4).run(matrices_in_blocks)
    starts_of, ends, directions = zip(*got, strict=True)
    mean = torch.stack(starts_of).mean(0)
    torch.testing.assert_close(torch.stack(ends).mean(0), mean, rtol=0, atol=1e-12)
    assert torch.stack(ends).std(0).norm() < 0.5 * torch.stack(starts_of).std(0).norm()
    for rank in range(4):
        other = (rank + 1) % 4
        one = directions[rank][f"direction of rank {other}"]["weight"]
        assert torch.equal(one, directions[other][f"direction of rank {rank}"]["weight"])


def uneven_epochs(method):
    model, make = torch.nn.Linear(3, 1), partial(torch.optim.SGD, lr=0.05)
    if method == "qadam":
        make = partial(bf.QAdamOptimizer, lr=0.05, warmup_steps=2)
    plain = make(model.parameters())
    optimizer = bf.DistributedOptimizer(plain, model, method, **every_step(method))

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.ones(2, 3)) - bf.rank()).square().mean().backward()
            optimizer.step()

    train(2)  # qadam's warm-up, which must be over
    begun = optimizer.round
    for epoch in range(2):
        with bf.join(optimizer):
            train(3 + 2 * ((bf.rank() + epoch) % 3))
    train(1)
    return optimizer.round - begun, bool(model.weight.isfinite().all())


@pytest.mark.parametrize(
    "method",
    one_of_each_kind(name for name in ALGORITHMS if name not in ONE_SIDED),
)
def test_every_method_goes_on_without_those_who_are_done(method):
    """Two epochs of 3, 5 and 7 steps: as many rounds as the last rank makes, on all ranks."""
    rounds = 30 if ALGORITHMS[method].hidden_rounds else 15
    assert LoopbackWorld(3).run(uneven_epochs, method) == [(rounds, True)] * 3
