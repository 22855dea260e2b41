"""Bagua's raw collectives, among all ranks and in groups."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
import asyncddp.integrations.bagua.torch_api as bagua
from tests.support import LoopbackWorld, on

N = 4
OPERATORS = {"SUM": 34, "PRODUCT": 3640, "MIN": 4, "MAX": 13, "BOR": 15, "BAND": 0, "BXOR": 4}
"""What becomes of 4, 7, 10 and 13."""


def own(*shape, dtype=torch.float32):
    """A tensor of this rank: 100 times its number, and counting up."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)
    return numbers + 100 * bagua.get_rank()


def collectives(ranks, comm):
    """Every collective among ranks, which gives what all ranks' tensors say; the place is ours."""
    place, n = ranks.index(bagua.get_rank()), len(ranks)
    every = [torch.arange(2.0 * n) + 100 * rank for rank in ranks]
    x = own(2 * n)
    into = torch.zeros(2 * n)

    bagua.allreduce(x, into, comm=comm)
    assert torch.equal(into, sum(every))
    bagua.allreduce(x, into.view(2, n), op=bagua.ReduceOp.AVG, comm=comm)
    assert torch.equal(into, sum(every) / n)
    bagua.allreduce_inplace(x, comm=comm)
    assert torch.equal(x, sum(every))
    pair = [own(2 * n), own(1)]
    bagua.allreduce_coalesced_inplace(pair, bagua.ReduceOp.MAX, comm)
    assert torch.equal(pair[0], every[-1])
    assert pair[1].item() == 100 * ranks[-1]

    root = n - 1
    into.zero_()
    bagua.reduce(own(2 * n), into, root, comm=comm)
    assert torch.equal(into, sum(every) if place == root else torch.zeros(2 * n))
    x = own(2 * n)
    bagua.reduce_inplace(x, root, bagua.ReduceOp.MIN, comm)
    assert torch.equal(x, every[0] if place == root else every[place])

    whole = torch.zeros(2 * n * n)
    bagua.allgather(own(2, n), whole, comm)
    assert torch.equal(whole, torch.cat(every))
    x = torch.zeros(2 * n)
    x[2 * place : 2 * place + 2] = place
    bagua.allgather_inplace(x, comm)
    assert torch.equal(x, torch.arange(float(n)).repeat_interleave(2))

    whole.zero_()
    bagua.gather(own(2 * n), whole, root, comm)
    assert torch.equal(whole, torch.cat(every) if place == root else torch.zeros(2 * n * n))
    x = torch.zeros(3 * n) if place == root else torch.full((3,), float(place))
    (x[3 * root :] if place == root else x).fill_(place)
    bagua.gather_inplace(x, 3, root, comm)
    assert torch.equal(x[::3], torch.arange(float(n)) if place == root else torch.ones(1) * place)

    part = torch.zeros(1, 2)
    bagua.scatter(own(2 * n) if place == root else part, part, root, comm)
    assert torch.equal(part.view(-1), every[root][2 * place : 2 * place + 2])
    x = own(2 * n) if place == root else torch.zeros(2)
    bagua.scatter_inplace(x, 2, root, comm)
    mine = x[2 * place : 2 * place + 2] if place == root else x
    assert torch.equal(mine, every[root][2 * place : 2 * place + 2])

    part = torch.zeros(2)
    bagua.reduce_scatter(own(2 * n), part, comm=comm)
    assert torch.equal(part, sum(every)[2 * place : 2 * place + 2])
    x = own(2 * n)
    bagua.reduce_scatter_inplace(x, bagua.ReduceOp.AVG, comm)
    assert torch.equal(x[2 * place : 2 * place + 2], (sum(every) / n)[2 * place : 2 * place + 2])

    exchanged = torch.cat([one[2 * place : 2 * place + 2] for one in every])
    bagua.alltoall(own(2 * n), into, comm)
    assert torch.equal(into, exchanged)
    x = own(2 * n)
    bagua.alltoall_inplace(x, comm)
    assert torch.equal(x, exchanged)
    various(ranks, place, comm)

    x = own(3)
    bagua.broadcast(x, root, comm)
    assert x.tolist() == [100.0 * ranks[-1] + i for i in range(3)]
    pair = [own(2), own(1, dtype=torch.int64)]
    bagua.broadcast_coalesced(pair, 0, comm)
    assert [one[0].item() for one in pair] == [100 * ranks[0]] * 2
    found = bagua.broadcast_object({"rank": bagua.get_rank()}, root, comm)
    assert found == {"rank": ranks[-1]}
    bagua.barrier(comm)


def various(ranks, place, comm):
    """Rank i of the group sends j + 1 elements to rank j, which puts them in reverse order."""
    n = len(ranks)
    counts = [other + 1 for other in range(n)]
    starts = [sum(counts[:other]) for other in range(n)]
    mine = place + 1
    into = torch.full((n * mine,), -1.0)
    places = [mine * (n - 1 - other) for other in range(n)]
    bagua.alltoall_v(own(sum(counts)), counts, starts, into, [mine] * n, places, comm)
    first = sum(range(mine))
    expected = [[100.0 * rank + first + i for i in range(mine)] for rank in reversed(ranks)]
    assert into.view(n, mine).tolist() == expected


def all_collectives():
    bagua.init_process_group()
    collectives(list(range(N)), None)
    odd = bagua.new_group([3, 1])
    even = bagua.new_group([0, 2])
    mine = odd if bagua.get_rank() % 2 else even
    for group in (odd, even):
        before = own(2)
        if group is mine:
            collectives(list(group.ranks), group)
        else:  # nothing happens on ranks that are no members
            bagua.allreduce_inplace(before, comm=group.get_global_communicator())
            assert bagua.broadcast_object(1, comm=group) is None
            assert torch.equal(before, own(2))
            assert group.get_global_communicator().rank() == -1
    collectives(list(mine.ranks), mine.get_global_communicator())
    if bagua.get_rank() < 2:  # two ranks to and fro, by their numbers in the world
        other = 1 - bagua.get_rank()
        x = own(3)
        if bagua.get_rank() == 0:
            bagua.send(x, other)
            bagua.recv(x, other)
        else:
            bagua.recv(y := torch.zeros(3), other)
            assert y.tolist() == [0.0, 1.0, 2.0]
            bagua.send(x, other)
        assert x[0].item() == 100.0


@on("loopback-4", "mpi-4")
def test_collectives_give_what_they_say(world):
    """Among all ranks, in groups with communicators of their own, and between two ranks."""
    world.run(all_collectives)


def test_communicators_of_nodes():
    """Ranks on a node, and the first ones of all nodes, of all ranks and of a group."""

    def case():
        bagua.init_process_group()
        found = []
        for group in (bagua.new_group(), bagua.new_group([1, 2, 3])):
            near, between = group.get_intra_node_communicator(), group.get_inter_node_communicator()
            x, y = torch.tensor([bagua.get_rank()]), torch.tensor([bagua.get_rank()])
            bagua.allreduce_inplace(x, comm=near)
            bagua.allreduce_inplace(y, comm=between)
            found.append((x.item(), y.item(), near.nranks(), between.rank()))
        return found

    assert LoopbackWorld(4).run(case, settings={"ranks_per_machine": 2}) == [
        [(1, 2, 2, 0), (0, 0, 1, -1)],
        [(1, 1, 2, -1), (1, 3, 1, 0)],
        [(5, 2, 2, 1), (5, 3, 2, 1)],
        [(5, 3, 2, -1), (5, 3, 2, -1)],
    ]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    """Each has Bagua's number, and may be given by it."""

    def case():
        bagua.init_process_group()
        x = torch.tensor(4 + 3 * bagua.get_rank())
        bagua.allreduce_inplace(x, op=int(bagua.ReduceOp[name]))
        return x.item()

    assert LoopbackWorld(4).run(case) == [OPERATORS[name]] * 4


def test_mistakes():
    """Sizes, ranks and operators that cannot be are named."""

    def case():
        bagua.init_process_group()
        x = torch.ones(3)
        with pytest.raises(bf.ArgumentError, match="share equally, got 3"):
            bagua.reduce_scatter(x, x)
        with pytest.raises(bf.ArgumentError, match="expected 6 elements, got 3"):
            bagua.allgather(x, x)
        with pytest.raises(bf.ArgumentError, match=r"argument dst: .* in 0\.\.1, got 2"):
            bagua.reduce(x, x, 2)
        with pytest.raises(bf.ArgumentError, match=r"one of SUM \(0\), .* got 4"):
            bagua.allreduce_inplace(x, op=4)
        with pytest.raises(bf.ArgumentError, match="parts inside of 3 elements, got 2 at 2"):
            bagua.alltoall_v(x, [2, 2], [0, 2], x, [1, 1], [0, 1])
        with pytest.raises(bf.ArgumentError, match="a number for each of 2 ranks"):
            bagua.alltoall_v(x, [2], [0], x, [1, 1], [0, 1])
        with pytest.raises(bf.ArgumentError, match="at least 2 times 2 elements, got 3"):
            bagua.gather_inplace(x, 2, bagua.get_rank())

    LoopbackWorld(2).run(case)


def test_a_group_of_torch():
    """``from_torch_group`` takes the ranks of a group of torch.distributed."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:

        def case():
            bagua.init_process_group()
            return bagua.from_torch_group(torch.distributed.group.WORLD).ranks

        assert LoopbackWorld(1).run(case) == [(0,)]
    finally:
        torch.distributed.destroy_process_group()
