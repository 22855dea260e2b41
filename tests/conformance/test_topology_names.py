"""A topology is a graph or schedule, a function, or a name everywhere; J and H are two things."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp import simulate, topology
from tests.support import LoopbackWorld

FORMS = {
    "graph": lambda n: topology.ring(n),
    "function": lambda n: topology.ring,
    "name": lambda n: "ring",
}
MACHINES = {"communication": "hierarchical_neighbor_allreduce"}


def model_of_rank():
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, float(bf.rank()))
    return model


def one_step(wrapped, model):
    model(torch.ones(1, 2)).sum().backward()
    wrapped.step()
    return model.weight[0, 0].item()


def by_optimizer(form, options=None):
    nodes = bf.machine_size() if options else bf.size()
    options = {"topology": FORMS[form](nodes), **(options or {})}
    model = model_of_rank()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return one_step(bf.DistributedOptimizer(sgd, model, **options), model)


def by_switch(form):
    model = model_of_rank()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = bf.DistributedOptimizer(sgd, model, communication="empty", topology="complete")
    wrapped.communication = "neighbor_allreduce"
    wrapped.switch_to("adapt_then_combine", replicas="keep", topology=FORMS[form](bf.size()))
    return one_step(wrapped, model)


def by_module(form):
    model = model_of_rank()
    ddp = bf.DecentralizedDataParallel(
        model,
        lambda named: torch.optim.SGD([one for _, one in named], lr=0.1),
        topology="complete",
    )
    ddp.set_topology(FORMS[form](bf.size()))
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
    ddp.close()
    return model.weight[0, 0].item()


def by_world(form):
    bf.set_topology(FORMS[form](bf.size()))
    bf.set_machine_topology(FORMS[form](bf.machine_size()))
    found = bf.neighbor_allreduce(torch.tensor(float(bf.rank()))).item()
    return found, topology.describe(bf.load_topology()), bf.in_neighbor_machine_ranks()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [by_optimizer, by_switch, by_module, by_world])
def test_a_topology_in_each_form(case, form):
    """The same neighbours and the same values."""
    world = LoopbackWorld(5)
    assert world.run(case, form) == world.run(case, "graph")


@pytest.mark.parametrize("form", FORMS)
def test_of_machines(form):
    """A function and a name count machines where a method averages between them."""
    world, settings = LoopbackWorld(6), {"ranks_per_machine": 2}
    found = world.run(by_optimizer, form, MACHINES, settings=settings)
    assert found == world.run(by_optimizer, "graph", MACHINES, settings=settings)


@pytest.mark.parametrize("own", [True, False])
def test_simulated(own):
    """For all methods, and as a setting of one."""

    def run(given):
        options = {"topology": given}
        return simulate.compare(
            simulate.least_squares(5),
            [("adapt_then_combine", options if own else {})],
            lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            steps=3,
            **({} if own else options),
        ).runs[0]

    runs = [run(form(5)) for form in FORMS.values()]
    for other in runs[1:]:
        assert (other.loss[1:] == runs[0].loss[1:]).all()


def test_a_name_that_is_none():
    """The error lists the names on each rank."""
    for outcome in LoopbackWorld(2).outcomes(lambda: bf.set_topology("rimg")):
        assert outcome.error == "TopologyError"
        assert "Did you mean 'ring'?" in outcome.message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"algorithm": "adapt_then_combine", "communication_interval": 8},
            "communication_interval: it counts steps of the optimizer, H, .*adapt_then_combine "
            "takes num_steps_per_communication, which counts backward passes, J",
        ),
        (
            {"algorithm": "local_sgd", "num_steps_per_communication": 8},
            "num_steps_per_communication: it counts backward passes, J, and local_sgd takes "
            "communication_interval, which counts steps of the optimizer, H, here 8",
        ),
    ],
    ids=["H", "J"],
)
@pytest.mark.parametrize("way", ["optimizer", "module", "simulated"])
def test_steps_and_passes_are_two_things(given, words, way):
    """Who gives the one for the other is told what each counts, and which the method takes."""

    def case():
        model = torch.nn.Linear(2, 1)
        if way == "optimizer":
            bf.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **given)
        elif way == "module":
            bf.DecentralizedDataParallel(
                model, lambda named: torch.optim.SGD([one for _, one in named], lr=0.1), **given
            )
        else:
            simulate.train(
                simulate.least_squares(2),
                lambda parameters: torch.optim.SGD(parameters, lr=0.01),
                steps=1,
                **given,
            )

    for outcome in LoopbackWorld(2).outcomes(case):
        assert outcome.error == "ArgumentError"
        with pytest.raises(bf.ArgumentError, match=words):
            raise bf.ArgumentError(outcome.message)
