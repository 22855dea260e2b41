"""Point-to-point exchanges among the ranks of a group, from which verbs are built."""

from __future__ import annotations

import torch

import asyncddp as bf
from asyncddp.device.stream_interfaces import HostStreams
from asyncddp.device.stream_registry import use_streams_on_cpu
from asyncddp.engine import OperationSpec
from asyncddp.ops.group_exchange import exchange_all_gather, exchange_all_to_all
from asyncddp.ops.validation import signature_of
from tests.support import on
from tests.support.loops import on_each_rank

LENGTHS = (0, 3, 70_001, 1)
"""Nothing, what travels in its message, and what follows it in bulk."""


def part(source, target):
    return torch.arange(LENGTHS[(source + target) % 4], dtype=torch.float64) + source


def ran(steps):
    return bf.current().engine.run(OperationSpec("exchange", steps, "it"))


def all_to_all(group):
    parts = [part(bf.rank(), target) for target in group]
    form = signature_of("exchange", parts[0], ragged=True)
    got = ran(lambda op: exchange_all_to_all(op, group, form, parts))
    assert got[group.index(bf.rank())] is parts[group.index(bf.rank())]
    for source, one in zip(group, got, strict=True):
        assert torch.equal(one, part(source, bf.rank()))


def all_gather(group):
    own = part(bf.rank(), 0)
    form = signature_of("exchange", own, ragged=True)
    got = ran(lambda op: exchange_all_gather(op, group, form, own))
    for source, one in zip(group, got, strict=True):
        assert torch.equal(one, part(source, 0))


def exchanges(*, reverse):
    group = list(range(bf.size()))[:: -1 if reverse else 1]
    for _ in range(3):
        all_to_all(group)
        all_gather(group)


def test_every_rank_gets_the_part_that_every_other_has_for_it(world):
    """In the order of the group, whatever that is; its own part is not copied."""
    world.run(exchanges, reverse=False)
    world.run(exchanges, reverse=True)


@on("mpi-4")
@on_each_rank
def test_tensors_of_a_device_take_its_transport():
    """What device tensors go through, run over streams on the host."""
    with use_streams_on_cpu(HostStreams()):
        exchanges(reverse=False)


def among_some():
    if bf.rank() != 1:
        all_to_all([0, *range(2, bf.size())])
    return bf.allreduce(torch.tensor([1.0]), average=False).item()


@on("loopback-4", "mpi-4")
def test_ranks_outside_the_group_are_not_asked(world):
    """A rank that is in no group goes on to the next verb."""
    assert world.run(among_some) == [4.0] * 4
