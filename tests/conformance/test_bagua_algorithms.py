"""Bagua's algorithms, through its own names: what a loop gives that calls the user's optimizer."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import asyncddp as bf
import asyncddp.integrations.bagua.torch_api as bagua
from asyncddp.integrations.bagua.torch_api.algorithms import (
    bytegrad,
    decentralized,
    gradient_allreduce,
    q_adam,
)
from asyncddp.topology import mixing_matrix, shift_one
from tests.conformance import bagua_reference as reference
from tests.conformance.bagua_reference import LR, STEPS, batches, flat, gradient_step, net, train
from tests.support import LoopbackWorld, on

GRADIENT = gradient_allreduce.GradientAllReduceAlgorithm


def wrapped(algorithm, *, seed=0, kind=torch.optim.SGD, group=None, **options):
    """A model of this rank and its optimizer, wrapped."""
    model = net(seed)
    optimizer = kind(model.parameters(), **{"lr": LR, **options})
    return model.with_bagua([optimizer], algorithm, process_group=group), optimizer


def trained(algorithm, steps=STEPS, **options):
    """The parameters after some steps."""
    bagua.init_process_group()
    model, optimizer = wrapped(algorithm, **options)
    train(model, optimizer, bagua.get_rank(), steps)
    return flat(model)


def all_mean(step, vectors):
    return [torch.stack(vectors).mean(0)] * len(vectors)


def by_peers(step, vectors):
    matrix = torch.from_numpy(mixing_matrix(shift_one(len(vectors)).graph(step))).float()
    return list(matrix @ torch.stack(vectors))


def every_other(mix):
    return lambda step, vectors: mix(step // 2, vectors) if step % 2 == 0 else vectors


# the start


def pretrained(kind, options):
    """A model and an optimizer that have trained alone, other ones on each rank."""
    model = net(bagua.get_rank())
    model.register_buffer("count", torch.tensor(bagua.get_rank()))
    optimizer = kind(model.parameters(), **options)
    train(model, optimizer, bagua.get_rank(), 5 * bagua.get_rank())
    return model, optimizer


def starts_equal(kind, options):
    bagua.init_process_group()
    model, optimizer = pretrained(kind, {**options, "lr": 0.1 * (1 + bagua.get_rank())})
    model.with_bagua([optimizer], GRADIENT())
    state = optimizer.state_dict()
    return bf.allgather_object([model.state_dict(), state["state"], state["param_groups"]])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adam, {}),
        (torch.optim.Rprop, {}),
    ],
)
def test_all_ranks_start_from_the_first(kind, options):
    """Parameters, buffers, optimizer state and options are rank 0's, also where it has no state."""
    every = LoopbackWorld(3).run(starts_equal, kind, options)[0]
    for one in every[1:]:
        for ours, theirs in zip(_leaves(one), _leaves(every[0]), strict=True):
            same = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
            assert same


def _leaves(value):
    return torch.utils._pytree.tree_leaves(value)


def test_lbfgs_is_refused():
    """Its state is not one of parameters; the error is a ValueError as in Bagua."""

    def case():
        bagua.init_process_group()
        with pytest.raises(ValueError, match="got LBFGS"):
            wrapped(GRADIENT(), kind=torch.optim.LBFGS)

    LoopbackWorld(2).run(case)


# each algorithm against its simulation


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_gradients(hierarchical, average):
    """Ranks are equal bit for bit, and what large batches would give, or n times the gradient."""
    found = LoopbackWorld(4).run(
        trained, GRADIENT(hierarchical, average), settings={"ranks_per_machine": 2}
    )
    assert all(torch.equal(one, found[0]) for one in found)
    expected = reference.simulate(4, None, average=average)[0]
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("average", [False, True])
def test_bytegrad(average):
    """Ranks are equal bit for bit, and near to what gradients in full would give."""
    found = LoopbackWorld(4).run(trained, bytegrad.ByteGradAlgorithm(False, average))
    assert all(torch.equal(one, found[0]) for one in found)
    expected = reference.simulate(4, None, average=average)[0]
    torch.testing.assert_close(found[0], expected, rtol=0, atol=2e-3)
    assert not torch.equal(found[0], expected)


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize(("mode", "mix"), [("all", all_mean), ("shift_one", by_peers)])
@pytest.mark.parametrize("n", [2, 4])
def test_decentralized(n, mode, mix, interval):
    """Gradients before the average, applied after it; the first step communicates."""
    algorithm = decentralized.DecentralizedAlgorithm(False, mode, interval)
    found = LoopbackWorld(n).run(trained, algorithm)
    for ours, theirs in zip(
        found, reference.simulate(n, mix if interval == 1 else every_other(mix)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_peers_need_an_even_number():
    """An odd number of ranks is refused, in words that name it."""
    algorithm = decentralized.DecentralizedAlgorithm(False, "shift_one")
    outcomes = LoopbackWorld(3).outcomes(trained, algorithm)
    assert {one.error for one in outcomes} == {"TopologyError"}
    assert "n=3" in outcomes[0].message


@pytest.mark.parametrize(("mode", "ranks"), [("all", 3), ("shift_one", 4)])
def test_hierarchical_ranks_of_a_node_are_equal(mode, ranks):
    """When the backward pass and the update are done, they differ by their own gradients alone."""

    def case():
        bagua.init_process_group()
        algorithm = decentralized.DecentralizedAlgorithm(True, mode)
        model, optimizer = wrapped(algorithm, lr=0.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(bagua.get_rank())
        before = bf.allgather(flat(model)[None])
        gradient_step(model, optimizer, *batches(0)[0])
        return before.mean(0), flat(model)

    found = LoopbackWorld(ranks).run(case, settings={"ranks_per_machine": 2})
    for rank, (mean, vector) in enumerate(found):
        assert torch.equal(vector, found[rank // 2 * 2][1])
        torch.testing.assert_close(vector, mean)


@pytest.mark.parametrize("hierarchical", [False, True])
def test_low_precision_decentralized_comes_near_the_average(hierarchical):
    """With a step size of 0, different models approach their mean, up to quantisation."""

    def case():
        bagua.init_process_group()
        algorithm = decentralized.LowPrecisionDecentralizedAlgorithm(hierarchical)
        model, optimizer = wrapped(algorithm, lr=0.0)
        for group in optimizer.param_groups:
            group["lr"] = 1.0 if bagua.get_rank() == 0 else 0.0
        gradient_step(model, optimizer, *batches(0)[0])
        optimizer.param_groups[0]["lr"] = 0.0
        start = bf.consensus_distance(model)
        for x, goal in itertools.islice(itertools.cycle(batches(0)), 30):
            gradient_step(model, optimizer, x, goal)
        return start, bf.consensus_distance(model)

    start, end = LoopbackWorld(4).run(case, settings={"ranks_per_machine": 2})[0]
    assert end < start / 50


def test_low_precision_needs_all_parameters():
    """A parameter that belongs to no optimizer is an error, a RuntimeError as in Bagua."""

    def case():
        bagua.init_process_group()
        model = net(0)
        optimizer = torch.optim.SGD(model.fc1.parameters(), lr=LR)
        algorithm = decentralized.LowPrecisionDecentralizedAlgorithm(hierarchical=False)
        with pytest.raises(RuntimeError, match=r"parameter fc2\.weight belongs to none"):
            model.with_bagua([optimizer], algorithm)

    LoopbackWorld(2).run(case)


def qadam(model, warmup):
    optimizer = q_adam.QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=warmup)
    model.with_bagua([optimizer], q_adam.QAdamAlgorithm(optimizer, hierarchical=False))
    return optimizer


def test_qadam():
    """Ranks stay equal in both stages; the second moment is frozen after the warm-up."""

    def case():
        bagua.init_process_group()
        model = net(bagua.get_rank())
        optimizer, seen = qadam(model, 5), []
        for x, goal in batches(bagua.get_rank()):
            gradient_step(model, optimizer, x, goal)
            seen.append(optimizer.state[model.fc1.weight]["exp_avg_sq"].clone())
        return flat(model), seen

    found = LoopbackWorld(3).run(case)
    assert all(torch.equal(one, found[0][0]) for one, _ in found)
    frozen = [torch.equal(a, b) for a, b in itertools.pairwise(found[0][1])]
    assert frozen == [False] * 3 + [True] * 6


@pytest.mark.parametrize("at", [2, 7])
def test_qadam_continues_from_a_state(at):
    """A state loaded into the user's optimizer goes on with the stage that it is in."""

    def case():
        bagua.init_process_group()
        rows = batches(bagua.get_rank())
        ours = net(0)
        optimizer, saved = qadam(ours, 5), None
        for step, (x, goal) in enumerate(rows):
            if step == at:
                saved = copy.deepcopy((ours.state_dict(), optimizer.state_dict()))
            gradient_step(ours, optimizer, x, goal)
        theirs = net(1)
        optimizer = qadam(theirs, 5)
        theirs.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for x, goal in rows[at:]:
            gradient_step(theirs, optimizer, x, goal)
        return flat(ours), flat(theirs)

    for ours, theirs in LoopbackWorld(2).run(case):
        assert torch.equal(ours, theirs)


# several models, groups and algorithms


def test_one_declaration_serves_two_models():
    """Two models train in turn, each as if it were alone."""

    def case():
        bagua.init_process_group()
        algorithm = GRADIENT()
        both = [wrapped(algorithm, seed=seed) for seed in (0, 0)]
        for x, goal in batches(bagua.get_rank()):
            for model, optimizer in both:
                gradient_step(model, optimizer, x, goal)
        return [flat(model) for model, _ in both]

    found = LoopbackWorld(3).run(case)
    expected = reference.simulate(3, None)[0]
    for vector in itertools.chain(*found):
        torch.testing.assert_close(vector, expected, rtol=0, atol=1e-6)


def trains_in_a_group(name, ranks):
    bagua.init_process_group()
    group = bagua.new_group(ranks)
    if bagua.get_rank() not in ranks:
        return None
    algorithm = {
        "gradient_allreduce": GRADIENT,
        "bytegrad": bytegrad.ByteGradAlgorithm,
        "decentralized": decentralized.DecentralizedAlgorithm,
    }[name]()
    model, optimizer = wrapped(algorithm, seed=bagua.get_rank(), group=group)
    train(model, optimizer, ranks.index(bagua.get_rank()))
    return flat(model)


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "decentralized"])
@on("loopback-4", "mpi-4")
def test_a_group_trains_by_itself(world, name):
    """The others do nothing; the group gives what so many ranks give."""
    found = world.run(trains_in_a_group, name, [1, 3])
    assert found[0] is found[2] is None
    if name == "gradient_allreduce":
        start = net(1)
        data = [batches(rank) for rank in range(2)]
        optimizer = torch.optim.SGD(start.parameters(), lr=LR)
        for rows in zip(*data, strict=True):
            x, goal = (torch.cat(parts) for parts in zip(*rows, strict=True))
            gradient_step(start, optimizer, x, goal)
        torch.testing.assert_close(found[1], flat(start), rtol=0, atol=1e-6)
    distance = (found[1] - found[3]).abs().max()
    assert distance < (0.05 if name == "decentralized" else 1e-12)


def test_a_chain_of_algorithms():
    """Wrapping again switches; models become the average, steps do not stack."""

    def case():
        bagua.init_process_group()
        model = net(bagua.get_rank())
        optimizer = q_adam.QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=3)
        chain = [
            bytegrad.ByteGradAlgorithm(),
            decentralized.DecentralizedAlgorithm(hierarchical=False),
            GRADIENT(),
            q_adam.QAdamAlgorithm(optimizer),
            decentralized.LowPrecisionDecentralizedAlgorithm(hierarchical=False),
            GRADIENT(),
        ]
        spread = []
        for algorithm in chain:
            before = bf.allgather(flat(model)[None]).mean(0)
            model.with_bagua([optimizer], algorithm)
            spread.append(float((flat(model) - before).abs().max()))
            train(model, optimizer, bagua.get_rank(), 4)
        steps = [int(state["step"]) for state in optimizer.state.values()]
        return spread, set(steps), bf.consensus_distance(model), model.bagua_train_step_counter

    for spread, steps, distance, counter in LoopbackWorld(2).run(case):
        assert max(spread[1:]) < 1e-6  # the first one gives rank 0's
        assert steps == {4 * 6}
        assert distance == 0.0
        assert counter == 4
