"""Contexts of groups: some ranks are a world of their own, on their own machines."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp.context.context import MachineLayout, use
from asyncddp.context.group_context import split_context
from tests.support import BEFORE_DEADLINE, LoopbackWorld, on

RANKS = (0, 2, 3)


def trains_in_a_group():
    context = bf.current()
    group = split_context(context, RANKS)
    alone = bf.allreduce(torch.tensor([float(bf.rank())])).item()
    if group is None:
        return None, alone
    with use(group):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, context.rank)
        bf.broadcast_parameters(model, root_rank=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = bf.DistributedOptimizer(optimizer, model, algorithm="gradient_allreduce")
        place = (bf.rank(), bf.size(), bf.machine_rank(), bf.local_rank(), bf.local_size())
    model(torch.full((1, 1), float(context.rank))).sum().backward()
    optimizer.step()
    return place, alone, model.weight.item()


@on("loopback-4", "mpi-4")
def test_a_group_is_a_world_of_its_own(world):
    """Members train among themselves, between collectives of all ranks; machines stay theirs."""
    found = world.run(trains_in_a_group, settings={"ranks_per_machine": 2})
    assert found == [
        ((0, 3, 0, 0, 1), 1.5, pytest.approx(3 - 5 / 3)),
        (None, 1.5),
        ((1, 3, 1, 0, 2), 1.5, pytest.approx(3 - 5 / 3)),
        ((2, 3, 1, 1, 2), 1.5, pytest.approx(3 - 5 / 3)),
    ]


def test_machines_without_members_are_left_out():
    """A group has machines where it has ranks, in their order."""
    layout = MachineLayout(((0, 3), (1, 4), (2, 5)), recording=(1,), rank_on_host=4)
    assert layout.restricted_to([0, 2, 5]) == MachineLayout(((0,), (1, 2)), (), 4)


def fails_while_others_wait():
    group = split_context(bf.current(), RANKS)
    if group is None:
        return
    if bf.rank() == 3:
        raise ZeroDivisionError
    with use(group):
        bf.allreduce(torch.ones(1))


def returns_while_others_wait():
    group = split_context(bf.current(), RANKS)
    if group is not None and bf.rank() != 3:
        with use(group):
            bf.allreduce(torch.ones(1))


@pytest.mark.parametrize("case", [fails_while_others_wait, returns_while_others_wait])
def test_a_rank_that_is_gone_is_gone_for_the_group(case):
    """Nobody waits for a rank that has failed or ended until the deadline."""
    outcomes = LoopbackWorld(4).outcomes(case)
    for rank in (0, 2):
        assert outcomes[rank].error == "PeerLeftError"
        assert outcomes[rank].seconds < BEFORE_DEADLINE
