"""``hierarchical_neighbor_allreduce``: the mean inside a machine, neighbours between machines."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld, on
from tests.support.loops import each, on_each_rank
from tests.support.oracle import AVERAGING, FAMILIES, SHAPES, check, family, held, mixed, options

BY_TWO = {"ranks_per_machine": 2}
FOUR = on("loopback-4", "mpi-4")


def mean_of(machine, of):
    """The mean over a machine, in double precision."""
    members = range(machine * bf.local_size(), (machine + 1) * bf.local_size())
    parts = torch.stack([of(rank) for rank in members])
    return parts.to(torch.complex128 if parts.is_complex() else torch.float64).mean(dim=0)


def expected_of(near, of, sent_with=lambda source, target: 1.0):
    return mixed(
        bf.machine_rank(),
        near.self_weight,
        near.src_weights,
        lambda machine: mean_of(machine, of),
        sent_with,
    )


def averages(dtype):
    bf.set_machine_topology(topology.ring(bf.machine_size(), style="left"))
    near = topology.neighbors_of(bf.load_machine_topology(), bf.machine_rank())
    for seed, shape in enumerate(SHAPES):

        def of(rank, shape=shape, seed=seed):
            return held(rank, shape, dtype, seed)

        x = of(bf.rank())
        got = bf.hierarchical_neighbor_allreduce(x, **options(dtype))
        check(got, x, expected_of(near, of))


@each("dtype", AVERAGING)
def test_every_dtype_and_shape(world, dtype):
    """Among them sizes that machines of two cannot halve, and tensors without elements."""
    world.run(averages, dtype, settings=BY_TWO if world.size > 1 else {})


@pytest.mark.parametrize("machines", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_machines_of_any_size(machines, size):
    """Machines' means are mixed by the machine topology, from one machine on."""
    settings = {"ranks_per_machine": size}
    LoopbackWorld(machines * size).run(averages, torch.float64, settings=settings)


def follows(name):
    chosen = family(name, bf.machine_size())
    if chosen is None:
        return False
    bf.set_machine_topology(chosen)
    for k in range(4):

        def of(rank, k=k):
            return held(rank, (3,), torch.float64, k)

        x = of(bf.rank())
        near = topology.neighbors_of(bf.load_machine_topology(), bf.machine_rank(), k)
        check(bf.hierarchical_neighbor_allreduce(x), x, expected_of(near, of))
    return True


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_every_graph_and_schedule_between_machines(name):
    """In round k, machines' means are mixed with row k of the machine topology."""
    existed = [all(LoopbackWorld(2 * m).run(follows, name, settings=BY_TWO)) for m in (2, 3, 4)]
    assert any(existed)


def anchors():
    """Four ranks on two machines, x = r: 1.5; 0.25 own and 0.75 of the other; moved and halved."""
    bf.set_machine_topology(topology.exponential_two(2))
    other = 1 - bf.machine_rank()
    x = torch.full((3,), float(bf.rank()))
    mean = bf.hierarchical_neighbor_allreduce(x)
    weighted = bf.hierarchical_neighbor_allreduce(
        x, self_weight=0.25, src_machine_weights={other: 0.75}
    )
    moved = bf.hierarchical_neighbor_allreduce(
        x, self_weight=0.0, src_machine_weights={other: 1.0}, dst_machine_weights=[other]
    )
    scaled = bf.hierarchical_neighbor_allreduce(
        x, self_weight=0.25, src_machine_weights={other: 0.5}, dst_machine_weights={other: 2.0}
    )
    return [value[0].item() for value in (mean, weighted, moved, scaled)]


@FOUR
def test_weights_between_machines(world):
    """Machine means are 0.5 and 2.5."""
    first, second = [1.5, 2.0, 2.5, 2.625], [1.5, 1.0, 0.5, 1.125]
    assert world.run(anchors, settings=BY_TWO) == [first, first, second, second]


@FOUR
@on_each_rank(settings=BY_TWO)
def test_many_in_flight_in_place():
    """Twenty in-place calls under way at once each write their own mean into their tensor."""
    bf.set_machine_topology(topology.exponential_two(bf.machine_size()))
    tensors = [torch.full((k,), float(bf.rank() + k)) for k in range(20)]
    handles = [bf.hierarchical_neighbor_allreduce_nonblocking_(x) for x in tensors]
    for k, (x, handle) in enumerate(zip(tensors, handles, strict=True)):
        assert handle.wait() is x
        assert x.tolist() == [1.5 + k] * k


def integers_scaled():
    """Means travel in double precision, so factors on sending serve integers too."""
    bf.set_machine_topology(topology.exponential_two(2))
    other = 1 - bf.machine_rank()
    return bf.hierarchical_neighbor_allreduce(
        torch.tensor([10 * bf.rank()]),
        self_weight=0.5,
        src_machine_weights={other: 1.0},
        dst_machine_weights={other: 0.5},
        round_integers=True,
    ).item()


@FOUR
def test_integers_may_be_scaled_between_machines(world):
    """dst_machine_weights apply to integers, and what they scale is not rounded on its way."""
    assert world.run(integers_scaled, settings=BY_TWO) == [15] * 4


def machines():
    bf.set_machine_topology(topology.ring(bf.machine_size(), style="right"))
    return (
        bf.machine_rank(),
        bf.machine_size(),
        bf.local_rank(),
        bf.local_size(),
        bf.is_homogeneous(),
        bf.in_neighbor_machine_ranks(),
        bf.out_neighbor_machine_ranks(),
    )


@FOUR
def test_simulated_machines(world):
    """ranks_per_machine=2 makes two machines of four ranks, each the other's neighbour."""
    assert world.run(machines, settings=BY_TWO) == [
        (rank // 2, 2, rank % 2, 2, True, [1 - rank // 2], [1 - rank // 2]) for rank in range(4)
    ]


def refused():
    with pytest.raises(bf.ArgumentError) as caught:
        bf.hierarchical_neighbor_allreduce(torch.ones(2))
    assert bf.in_neighbor_machine_ranks() == bf.out_neighbor_machine_ranks() == []
    return str(caught.value)


@FOUR
def test_without_a_machine_topology_it_says_how_to_set_one(world):
    """Without a machine topology the verb raises, and no rank has machine neighbours."""
    assert set(world.run(refused, settings=BY_TWO)) == {
        "no topology between machines is set: call set_machine_topology(...), for example with "
        "topology.exponential_two(2)"
    }


def test_machines_of_unequal_size_are_refused():
    """On machines of unequally many ranks the verb raises, and tells how many each has."""

    def case():
        bf.set_machine_topology(topology.ring(2))
        assert not bf.is_homogeneous()
        with pytest.raises(bf.ArgumentError) as caught:
            bf.hierarchical_neighbor_allreduce(torch.ones(2))
        return str(caught.value)

    assert set(LoopbackWorld(5).run(case, settings={"ranks_per_machine": 3})) == {
        "hierarchical_neighbor_allreduce: expected machines with equally many ranks, numbered one "
        "machine after the other; got machines of [3, 2] ranks. Start equally many on each "
        "(slots=…), with ranks mapped by slot"
    }
