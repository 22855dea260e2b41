"""``switch_to`` and ``switch_at``: what becomes of models, optimizer, buffers and mistakes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS
from asyncddp.algorithms.method_traits import CompressionUse
from tests.support import LoopbackWorld, on
from tests.support.bagua_net import LR, FrozenAdam, momentum_sgd, vector
from tests.support.bagua_simulation import Simulation
from tests.support.bagua_training import Run, all_equal, assert_near
from tests.support.methods import FORMULAS, fitting_graph

WARMUP = 15
ring = topology.ring
LEGS = {
    "bytegrad": ({}, Simulation.bytegrad),
    "decentralized": ({}, Simulation.decentralized),
    "gradient_allreduce": ({}, Simulation.gradient_allreduce),
    "win_put": ({"topology": ring}, Simulation.adapt_with_combine),
    "qadam": ({}, Simulation.qadam),
    "async_model_average": ({"topology": ring}, Simulation.adapt_with_combine),
    "low_precision_decentralized": (
        {"communication_interval": 2},
        partial(Simulation.low_precision, interval=2),
    ),
    "push_sum": ({"topology": ring}, Simulation.adapt_then_combine),
    "overlap_sgp": ({"topology": ring}, Simulation.adapt_then_combine),
    "adapt_then_combine": ({"topology": ring}, Simulation.adapt_then_combine),
    "pull_get": ({"topology": ring}, Simulation.adapt_with_combine),
    "choco_sgd": ({"topology": ring, "compression": "minmax_uint8"}, Simulation.choco_sgd),
    "adapt_with_combine": ({"topology": ring}, Simulation.adapt_with_combine),
}
"""Methods, each with its arguments and its simulation; the step of qadam's stage is among."""
BY_FORMULA = [name for name in ALGORITHMS if name in {one.partition(",")[0] for one in FORMULAS}]
MORE = [name for name in BY_FORMULA if name not in LEGS]
"""Methods that tests hold to formulas of their own; here each begins from the mean as well."""
STEPS = 3


def arguments_of(name, n):
    """A leg's arguments, with the graph of n ranks."""
    if name in MORE:
        return {"topology": fitting_graph(name, n)}
    return {key: one(n) if callable(one) else one for key, one in LEGS[name][0].items()}


def chain(make):
    """All methods, one after the other; the models after each leg."""
    found, run = [], None
    for name in [*LEGS, *MORE]:
        arguments = arguments_of(name, bf.size())
        if run is None:
            run = Run(name, make=make, **arguments)
        else:
            run.optimizer.switch_to(name, **arguments)
        run.optimizer.force_barrier = ALGORITHMS[name].how[0].one_sided
        before = vector(run.model)
        run.train(STEPS)
        found.append((before, vector(run.model)))
    return found


@on("loopback-4", "mpi-2")
def test_a_chain_of_all_methods(world):
    """A5, I2: each leg is the simulation's, and each switch gives all ranks the mean."""
    assert {*LEGS, *MORE} == set(ALGORITHMS), "a new method belongs into the chain"
    got = world.run(chain, partial(bf.QAdamOptimizer, lr=LR, warmup_steps=WARMUP))
    simulation = Simulation(world.size, make=partial(FrozenAdam, warmup=WARMUP))
    for leg, (name, (_, simulate)) in enumerate(LEGS.items()):
        if leg:
            simulation.average()
        if name == "qadam":
            simulation.average_state()
        start = [one[leg][0] for one in got]
        assert leg == 0 or all_equal(start), name
        assert_near(start, simulation.vectors, 1e-4)
        options = {"steps": STEPS}
        if "topology" in LEGS[name][0]:
            options["graph"] = ring(world.size)
        simulate(simulation, **options)
        ended = [one[leg][1] for one in got]
        sends_differences = ALGORITHMS[name].compression is CompressionUse.DIFFERENCES
        assert_near(ended, simulation.vectors, 1e-3 if sends_differences else 1e-4)
        for rank, one in enumerate(ended):  # so that no rounding of a code is carried on
            simulation.assign_vector(rank, one)
    before = ended
    for leg, name in enumerate(MORE, len(LEGS)):
        start, ended = zip(*(one[leg] for one in got), strict=True)
        assert all_equal(start), name
        assert_near(start[:1], [torch.stack(list(before)).mean(0)], 1e-5)
        assert not any(map(torch.equal, start, ended)), name
        before = ended


# what a switch does to models, optimizers and buffers


class Normed(torch.nn.Module):
    """A model with buffers of floats and integers, and one layer that is used twice."""

    def __init__(self, rank):
        super().__init__()
        self.first = torch.nn.Linear(2, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.shared = torch.nn.Linear(6, 6)
        self.last = self.shared
        self.register_buffer("table", torch.arange(3) + 10 * rank)
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x):
        return self.last(torch.relu(self.shared(self.norm(self.first(x)))))


def state_of(model):
    return {key: one.clone() for key, one in model.state_dict().items()}


def switched(replicas, first, *others):
    """Train and switch; what the model has before and after each switch."""
    rank = bf.rank()
    model = Normed(rank)
    plain = momentum_sgd(model.parameters())
    optimizer = bf.DistributedOptimizer(
        plain, model, first, bucket_size_in_mb=2e-4, broadcast=False
    )
    data, found = torch.Generator().manual_seed(rank), []
    for method in others:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 2, generator=data) + rank).square().mean().backward()
            optimizer.step()
        momenta = [plain.state[p]["momentum_buffer"].clone() for p in model.parameters()]
        before = state_of(model)
        optimizer.switch_to(method, replicas=replicas)
        assert optimizer.algorithm == method
        after = [plain.state[p]["momentum_buffer"] for p in model.parameters()]
        assert all(map(torch.equal, momenta, after)), "momentum was touched"
        found.append((before, state_of(model)))
    return found


CHAIN = ("gradient_allreduce", "decentralized", "gradient_allreduce", "bytegrad")


def averaged(key, before):
    """What all ranks should have of a tensor after they have averaged."""
    tensors = [one[key] for one in before]
    if not tensors[0].is_floating_point():
        return tensors[0]
    if key.endswith("running_var"):
        means = torch.stack([one[key.replace("var", "mean")] for one in before])
        return (torch.stack(tensors) + (means - means.mean(0)).square()).mean(0)
    return torch.stack(tensors).mean(0)


@on("loopback-2", "mpi-2")
def test_a_switch_averages_models_and_leaves_momentum(world):
    """I2, I3: parameters and float buffers are the means, integers are rank 0's, all bit-equal.

    Also where momenta differ, so that a method which replicates the model has let it drift.
    """
    got = world.run(switched, "average", *CHAIN)
    for switch in range(len(CHAIN) - 1):
        before, after = zip(*(one[switch] for one in got), strict=True)
        for key in before[0]:
            assert all_equal([one[key] for one in after]), key
            torch.testing.assert_close(after[0][key], averaged(key, before), rtol=1e-6, atol=1e-6)


def test_equal_parameters_keep_their_bits():
    """Three equal numbers need not have themselves as their mean: who agrees is left alone."""

    def case():
        run = Run("gradient_allreduce", alike=True)
        run.train(3)
        before = vector(run.model)
        run.optimizer.switch_to("decentralized")
        return torch.equal(before, vector(run.model))

    assert LoopbackWorld(3).run(case) == [True] * 3


def test_ranks_that_trained_alone_are_averaged():
    """communication="empty" lets models differ, whatever the method replicates."""

    def case():
        run = Run("gradient_allreduce", communication="empty")
        run.train(3)
        before = vector(run.model)
        run.optimizer.switch_to("bytegrad")
        return before, vector(run.model)

    before, after = zip(*LoopbackWorld(3).run(case), strict=True)
    assert all_equal(after)
    torch.testing.assert_close(after[0], torch.stack(before).mean(0))


def test_all_take_what_rank_0_has():
    """replicas="rank0": parameters and all buffers, to the bit; momentum stays."""
    got = LoopbackWorld(3).run(switched, "rank0", "decentralized", "gradient_allreduce")
    for key, wanted in got[0][0][0].items():
        assert all_equal([wanted, *(one[0][1][key] for one in got)]), key


def test_models_that_differ_may_be_kept():
    """replicas="keep" leaves each rank its own, for methods that let them differ, and no others."""

    def case():
        run = Run("decentralized", peer_selection_mode="shift_one")
        run.train(2)
        before = vector(run.model)
        words = r"decentralized has let the ranks' models differ, and bytegrad would keep them so"
        with pytest.raises(bf.ArgumentError, match=words):
            run.optimizer.switch_to("bytegrad", replicas="keep")
        assert run.optimizer.algorithm == "decentralized"
        run.optimizer.switch_to("adapt_then_combine", replicas="keep", topology=ring(2))
        assert torch.equal(before, vector(run.model))
        run.train(1)
        return vector(run.model)

    assert all_equal(LoopbackWorld(2).run(case))


# when a switch comes


def scheduled(by_hand):
    schedule = {
        3: ("decentralized", {"communication_interval": 2}),
        6: "bytegrad",
        8: ("choco_sgd", {"compression": "top_k", "consensus_step": 0.1}),
    }
    if not by_hand:
        run = Run("gradient_allreduce", switch_at=schedule, cap=600)
        run.train(12)
        assert run.optimizer.algorithm == "choco_sgd"
        return vector(run.model)
    run = Run("gradient_allreduce", cap=600)
    for step in range(12):
        if step in schedule:
            entry = schedule[step]
            name, arguments = entry if isinstance(entry, tuple) else (entry, {})
            run.optimizer.switch_to(name, **arguments)
        run.train(1)
    return vector(run.model)


def test_a_schedule_switches_as_calls_do():
    """switch_at, with and without arguments: the same bits as switch_to after those steps."""
    world = LoopbackWorld(3)
    planned, called = world.run(scheduled, False), world.run(scheduled, True)
    assert all(map(torch.equal, planned, called))


@pytest.mark.parametrize("method", ["adapt_with_combine", "decentralized", "win_put", "pull_get"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_switch_while_a_round_is_pending(method, backward):
    """A forward pass has begun to average: that ends first, then all is averaged as ever."""

    def case():
        arguments = {} if method == "decentralized" else {"topology": ring(3)}
        run = Run(method, **arguments)
        run.optimizer.force_barrier = ALGORITHMS[method].how[0].one_sided
        run.train(2)
        loss = run.model(torch.ones(2, 2)).sum()
        if backward:
            loss.backward()
        before = vector(run.model)
        run.optimizer.switch_to("gradient_allreduce")
        run.optimizer.zero_grad()
        after = vector(run.model)
        run.train(2)
        return before, after, vector(run.model)

    before, after, ended = zip(*LoopbackWorld(3).run(case), strict=True)
    assert all_equal(after)
    torch.testing.assert_close(after[0], torch.stack(before).mean(0), rtol=1e-5, atol=1e-6)
    assert all_equal(ended)
