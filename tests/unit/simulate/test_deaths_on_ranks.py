"""Simulated deaths give what ranks of an elastic run get, to 1e-12."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch

import asyncddp as bf
from asyncddp import simulate, topology
from asyncddp.algorithms import ALGORITHMS, CommunicationPattern
from asyncddp.engine.elastic_progress import ElasticProgress
from asyncddp.simulate.problem import StackedBatches
from asyncddp.topology.builders import topology_for
from tests.unit.simulate.test_equality_with_ranks import (
    WAITING,
    optimizer_of,
    problem,
    same,
    sgd,
    short,
)

pytestmark = pytest.mark.training

STEPS = 14
DEADLINE = 30.0


class DiesError(Exception):
    """End of a rank in the middle of its training."""


class BegunRounds:
    """Rounds that each rank has begun, by which a rank dies while the others are in one."""

    def __init__(self, monkeypatch):
        self._begun, self._changed = {}, threading.Condition()
        begin_round = ElasticProgress.begin_round

        def counted(engine, name, number):
            view = begin_round(engine, name, number)
            with self._changed:
                self._begun[engine.transport.rank] = number + 1
                self._changed.notify_all()
            return view

        monkeypatch.setattr(ElasticProgress, "begin_round", counted)

    def wait_for(self, ranks, rounds):
        """Wait until all of these ranks have begun so many rounds."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: all(self._begun.get(rank, 0) >= rounds for rank in ranks), DEADLINE
            )


def until_view(number):
    """Wait until this rank has heard of the deaths."""
    ends = time.monotonic() + DEADLINE
    while bf.view().number < number:
        assert time.monotonic() < ends
        time.sleep(0.001)


def train_with_deaths(begun, given, optimizer, name, crashes, every, **settings):
    """Train on threads; a rank dies when the others are in the round that misses it.

    In methods of all ranks, and between two rounds, the others know of the death first.
    """
    batches, results, in_round = StackedBatches(given, 0), {}, not of_all_ranks(name)
    deaths = sorted(set(crashes.values()))

    def case():
        rank = bf.rank()
        model = copy.deepcopy(given.model[rank])
        wrapped = bf.DistributedOptimizer(
            optimizer(list(model.parameters())), model, name, **settings, broadcast=False
        )
        for step in range(STEPS):
            known = sum(death < step for death in deaths)
            due = in_round and (step + 1) % every == 0
            if crashes.get(rank) == step:
                living = [other for other, _ in enumerate(given.model) if other not in crashes]
                if due:
                    begun.wait_for(living, (step + 1) // every)
                raise DiesError
            until_view(known if due else sum(death <= step for death in deaths))
            inputs, *targets = (one[0] for one in batches.of([rank], [step]))
            wrapped.zero_grad()
            given.loss(model(inputs), *targets).backward()
            wrapped.step()
        results[rank] = {key: one.detach().clone() for key, one in model.named_parameters()}

    with (
        pytest.raises(bf.RankError, match="raised DiesError") as raised,
        bf.local_world(given.ranks, elastic=True, timeout=DEADLINE) as world,
    ):
        world.run(case)
    there = [rank for rank in range(given.ranks) if rank not in crashes]
    assert sorted(results) == there, raised.value
    return {key: torch.stack([results[rank][key] for rank in there]) for key in results[there[0]]}


def compare_deaths(monkeypatch, name, crashes, ranks=5, optimizer=None, **settings):
    """Hold the survivors of a simulation to those of a run."""
    start = 0.0 if ALGORITHMS[name]().replicates_model else 0.3
    given, optimizer = problem(ranks, start), optimizer or optimizer_of(name)
    scenario = simulate.Scenario(crashes=crashes)
    run = simulate.train(given, optimizer, name, steps=STEPS, scenario=scenario, **settings)
    every = settings.get("communication_interval", 1)
    begun = BegunRounds(monkeypatch)
    real = train_with_deaths(begun, given, optimizer, name, crashes, every, **settings)
    there = [rank for rank in range(ranks) if rank not in crashes]
    same({key: one[there] for key, one in run.parameters.items()}, real)


def of_all_ranks(name):
    """Whether a method averages over all ranks."""
    return ALGORITHMS[name]().how[0] is CommunicationPattern.GLOBAL


def named_topology(name):
    """A topology by name, which is drawn anew, where the method asks for one."""
    method = ALGORITHMS[name]()
    if of_all_ranks(name):
        return {}
    for graph in ("exponential_two", "ring", "tree", "complete"):
        if not any(method.needs.problems(topology_for(graph, 5))):
            return {"topology": graph}
    raise AssertionError(name)


REDONE = {"qadam", "async_model_average"}


@pytest.mark.parametrize("name", [name for name in WAITING if name not in REDONE])
def test_every_method_that_waits(name, monkeypatch):
    """A rank dies in the middle of a round: renormalised, then drawn anew, with what restarts."""
    options = {key: 2 for key in short(name) if key == "communication_interval"}
    compare_deaths(monkeypatch, name, {2: 5}, **named_topology(name), **options)


@pytest.mark.parametrize(
    ("name", "graph"),
    [("adapt_then_combine", topology.ring(6)), ("choco_sgd", topology.ring(6))],
)
def test_graphs_keep_their_edges(name, graph, monkeypatch):
    """A graph or schedule goes on without the dead rank's edges."""
    compare_deaths(monkeypatch, name, {2: 5, 4: 9}, 6, topology=graph)


def test_a_method_s_own_topology_is_drawn_anew(monkeypatch):
    """Also where it is no plain function of the number of ranks."""
    compare_deaths(monkeypatch, "low_precision_decentralized", {2: 5})


@pytest.mark.parametrize("name", ["gradient_tracking", "exact_diffusion", "choco_sgd", "diloco"])
def test_two_deaths(name, monkeypatch):
    """One after the other, and two at once."""
    options = {"communication_interval": 2} if name == "diloco" else {"topology": "ring"}
    compare_deaths(monkeypatch, name, {1: 3, 4: 8}, 6, sgd, **options)
    compare_deaths(monkeypatch, name, {0: 6, 4: 6}, 6, sgd, **options)
