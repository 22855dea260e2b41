"""``neighbor_allreduce`` gives ``(W @ X)[r]``: every dtype, shape, layout, graph and weight."""

from __future__ import annotations

import networkx as nx
import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.tensors.dtypes import DTYPES, DtypeKind
from tests.support import OF_SEVERAL, LoopbackWorld, on
from tests.support.loops import each, on_each_rank
from tests.support.oracle import (
    AVERAGING,
    FAMILIES,
    LAYOUTS,
    SHAPES,
    check,
    family,
    held,
    mixed,
    options,
)

SEVERAL = on(*OF_SEVERAL)
ROUNDS = 8


def row_of_this_rank(k=0):
    near = topology.neighbors_of(bf.load_topology(), bf.rank(), k)
    return near.self_weight, near.src_weights


def averages_shapes(dtype, shapes):
    for number, shape in enumerate(shapes):

        def of(rank, shape=shape, number=number):
            return held(rank, shape, dtype, seed=number)

        x = of(bf.rank())
        got = bf.neighbor_allreduce(x, **options(dtype))
        check(got, x, mixed(bf.rank(), *row_of_this_rank(), of))


@each("dtype", AVERAGING)
def test_every_dtype_and_shape(world, dtype):
    """On the default graph each rank gets its row of W X in its tensor's dtype and shape."""
    world.run(averages_shapes, dtype, SHAPES)


@on("loopback-4", "mpi-2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int16], ids=str)
@on_each_rank
def test_values_count_not_how_they_lie_in_memory(dtype):
    """Strided, sliced, offset, conjugated and negated views, and parameters; also in place."""
    for name, layout in LAYOUTS.items():
        x = layout(held(bf.rank(), (4, 6), dtype))
        torch.testing.assert_close(x.detach(), held(bf.rank(), (4, 6), dtype), msg=name)
        expected = mixed(bf.rank(), *row_of_this_rank(), lambda r: held(r, (4, 6), dtype))
        check(bf.neighbor_allreduce(x, **options(dtype)), x, expected)
        check(bf.neighbor_allreduce_(x, **options(dtype)).detach(), x, expected)


def averages_expanded():
    x = torch.tensor(float(bf.rank())).expand(3, 5)
    check(
        bf.neighbor_allreduce(x),
        x,
        mixed(bf.rank(), *row_of_this_rank(), lambda r: torch.full((3, 5), float(r))),
    )


@on("loopback-2", "mpi-2")
def test_an_expanded_tensor_is_averaged(world):
    """A tensor whose elements share one place in memory is averaged like a dense one."""
    world.run(averages_expanded)


# graphs and schedules


def follows(name):
    """All rounds of a family, each on new values; False where the family has no such member."""
    chosen = family(name, bf.size())
    if chosen is None:
        return False
    bf.set_topology(chosen)
    for k in range(ROUNDS):

        def of(rank, k=k):
            return held(rank, (3,), torch.float64, seed=k)

        x = of(bf.rank())
        check(bf.neighbor_allreduce(x), x, mixed(bf.rank(), *row_of_this_rank(k), of))
    return True


@pytest.mark.parametrize("name", FAMILIES)
def test_every_graph_and_schedule(world, name):
    """In round k each rank gets its row of W_k X, for every family of the library."""
    assert len(set(world.run(follows, name))) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_every_graph_and_schedule_on_other_numbers_of_ranks(name):
    """Odd numbers, no power of two, several machines; each family exists on one of them."""
    existed = [all(LoopbackWorld(n).run(follows, name)) for n in (3, 5, 6, 8)]
    assert any(existed)


def mixes_matrix(columns):
    """One schedule step by matrix: all ranks' columns at once."""
    x = torch.zeros(bf.size(), dtype=torch.float64)
    x[bf.rank()] = 1.0
    for _ in range(columns):
        x = bf.neighbor_allreduce(x)
    return x.tolist()


def test_the_product_of_rounds_is_the_product_of_matrices():
    """One-peer exponential on 8 ranks is the exact average after three rounds."""

    def product():
        bf.set_topology(topology.one_peer_exponential(8))
        return mixes_matrix(3)

    torch.testing.assert_close(
        torch.tensor(LoopbackWorld(8).run(product)),
        torch.full((8, 8), 1 / 8),
        rtol=0,
        atol=1e-16,
    )


def converges(steps):
    x = torch.tensor([float(bf.rank())])
    for _ in range(steps):
        x = bf.neighbor_allreduce(x)
    return x.item()


@on("loopback-4", "mpi-4")
def test_a_hundred_rounds_on_the_default_graph_reach_the_average(world):
    """Repeated averaging on four ranks converges to the mean within 1e-6."""
    assert world.run(converges, 100) == pytest.approx([1.5] * 4, abs=1e-6)


def two_rounds():
    bf.set_topology(topology.one_peer_exponential(bf.size()))
    return converges(2)


@on("loopback-4", "mpi-4")
def test_two_rounds_of_one_peer_exponential_are_exact(world):
    """On four ranks two rounds of the schedule give every rank exactly the mean."""
    assert world.run(two_rounds) == [1.5] * 4


@on("loopback-4", "mpi-4")
@on_each_rank
def test_each_name_counts_its_own_rounds():
    """The n-th use of a name takes round n; round= overrides it for one use and counts too.

    Names count their own rounds; ``round`` chooses one.
    """
    schedule = topology.one_peer_exponential(bf.size())
    bf.set_topology(schedule)
    x = torch.tensor([float(bf.rank())], dtype=torch.float64)

    def of(rank):
        return torch.tensor([float(rank)], dtype=torch.float64)

    def expect(got, k):
        check(got, x, mixed(bf.rank(), *row_of_this_rank(k), of))

    expect(bf.neighbor_allreduce(x, name="a"), 0)
    expect(bf.neighbor_allreduce(x, name="b"), 0)
    expect(bf.neighbor_allreduce(x, name="a"), 1)
    expect(bf.neighbor_allreduce(x), 0)
    expect(bf.neighbor_allreduce(x, name="b", round=0), 0)
    expect(bf.neighbor_allreduce(x, round=1), 1)
    expect(bf.neighbor_allreduce(x, name="b"), 2)


# weights by hand


def rolling(amount):
    return (bf.rank() + amount) % bf.size()


@on_each_rank
def test_given_neighbours_need_not_be_the_graph_s():
    """src_weights and dst_weights may name ranks that the topology does not connect.

    Averages with the exponential-two neighbours, all three arguments given.
    """
    n, me = bf.size(), bf.rank()
    hops = sorted({2**i for i in range(n.bit_length()) if 2**i < n})
    sources = sorted({(me - hop) % n for hop in hops})
    targets = sorted({(me + hop) % n for hop in hops})
    share = 1 / (len(sources) + 1)
    bf.set_topology(topology.ring(n))
    x = held(me, (4,), torch.float64)
    got = bf.neighbor_allreduce(
        x, self_weight=share, src_weights=dict.fromkeys(sources, share), dst_weights=targets
    )
    weights = dict.fromkeys(sources, share)
    check(got, x, mixed(me, share, weights, lambda r: held(r, (4,), torch.float64)))


def moves():
    """Every rank takes over the next one's value."""
    x = torch.full((2,), float(bf.rank()))
    ahead, behind = rolling(1), rolling(-1)
    return bf.neighbor_allreduce(
        x, self_weight=0.0, src_weights={ahead: 1.0}, dst_weights=[behind]
    )[0].item()


@SEVERAL
def test_values_can_be_moved(world):
    """With own weight 0 and a single source of weight 1, the result is the source's value."""
    n = world.size
    assert world.run(moves) == [(rank + 1) % n for rank in range(n)]


def half_sends():
    """Even ranks only send, odd ones only receive."""
    me = bf.rank()
    if me % 2 == 0:
        sources, targets = {}, [me + 1]
    else:
        sources, targets = {me - 1: 1.0}, []
    x = torch.full((2,), float(me))
    results = [
        bf.neighbor_allreduce(x, self_weight=1.0, src_weights=sources, dst_weights=targets)[0]
        for _ in range(3)
    ]
    x.fill_(-1)
    return [value.item() for value in results]


@SEVERAL
def test_ranks_may_only_send_or_only_receive(world):
    """src_weights or dst_weights may be empty on a rank, in the first and later uses."""
    expected = [[float(r if r % 2 == 0 else 2 * r - 1)] * 3 for r in range(world.size)]
    assert world.run(half_sends) == expected


def scales():
    """The sender's factors and the receiver's weights multiply."""
    n, me = bf.size(), bf.rank()
    peers = [rank for rank in range(n) if rank != me]
    factors = {peer: 1 + 0.5 * me + 0.25 * peer for peer in peers}
    weights = {peer: 0.1 * (peer + 1) for peer in peers}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64):
        x = held(me, (5,), dtype)
        got = bf.neighbor_allreduce(x, self_weight=-0.5, src_weights=weights, dst_weights=factors)
        expected = mixed(
            me,
            -0.5,
            weights,
            lambda r, d=dtype: held(r, (5,), d),
            lambda source, target: 1 + 0.5 * source + 0.25 * target,
        )
        check(got, x, expected)


@SEVERAL
def test_dst_weights_scale_what_is_sent(world):
    """A received tensor counts with the sender's factor times the receiver's weight."""
    world.run(scales)


def half_the_neighbourhood():
    bf.set_topology(topology.exponential_two(bf.size()))
    sources, targets = bf.in_neighbor_ranks(), bf.out_neighbor_ranks()
    x = torch.full((3,), float(bf.rank()))
    got = bf.neighbor_allreduce(
        x,
        self_weight=0.5,
        src_weights=dict.fromkeys(sources, 1.0),
        dst_weights=dict.fromkeys(targets, 0.5),
    )
    assert got.tolist() == [(bf.rank() + sum(sources)) / 2] * 3


def test_half_weights_give_half_the_neighbourhood_s_sum(world):
    """Own weight 0.5 and factors 0.5 halve the sum over a rank and its sources exactly."""
    world.run(half_the_neighbourhood)


@on_each_rank
def test_sums_and_means_of_tiny_doubles_are_exact():
    """Sums of 2**-256 have no rounding error, and the mean of equal values is that value.

    Sums of 2**-256 are exact, and so is the mean of equal values.
    """
    x = torch.full((4,), 2.0**-256, dtype=torch.float64)
    sources = bf.in_neighbor_ranks()
    ones = dict.fromkeys(sources, 1.0)
    total = bf.neighbor_allreduce(x, self_weight=1.0, src_weights=ones)
    assert total.tolist() == [(len(sources) + 1) * 2.0**-256] * 4
    assert torch.equal(bf.neighbor_allreduce(x), x)


@on("loopback-2", "loopback-4", "mpi-4")
@on_each_rank
def test_in_neighbours_left_out_count_nothing():
    """An in-neighbour of the graph that src_weights does not name adds nothing."""
    bf.set_topology(topology.complete(bf.size()))
    first = bf.in_neighbor_ranks()[:1]
    x = held(bf.rank(), (3,), torch.float64)
    weights = dict.fromkeys(first, 0.75)
    got = bf.neighbor_allreduce(x, self_weight=0.25, src_weights=weights)
    check(got, x, mixed(bf.rank(), 0.25, weights, lambda r: held(r, (3,), torch.float64)))


@on_each_rank
def test_without_sources_the_input_stays_and_is_not_shared():
    """Without sources the result is the weighted input, in memory of its own."""
    x = torch.full((3,), 4.0)
    got = bf.neighbor_allreduce(x, self_weight=0.5, src_weights={}, dst_weights=[])
    assert got.tolist() == [2.0] * 3
    got.zero_()
    assert x.tolist() == [4.0] * 3


def directed_columns():
    """A directed graph whose rows differ from its columns: the receiver's weight counts."""
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 0, 0.9), (0, 1, 0.1), (3, 0, 0.5)])
    graph.add_weighted_edges_from([(1, 1, 0.5), (1, 2, 0.5), (2, 2, 0.5), (2, 3, 0.5), (3, 3, 0.5)])
    bf.set_topology(graph)
    return bf.neighbor_allreduce(torch.tensor([bf.rank() + 1.0], dtype=torch.float64)).item()


@on("loopback-4", "mpi-4")
def test_the_weight_of_an_edge_is_the_receiver_s(world):
    """W[i, j] stands on the edge j → i: rank 0 gets 0.9 · 1 + 0.5 · 4."""
    assert world.run(directed_columns) == pytest.approx([2.9, 1.1, 2.5, 3.5], abs=1e-15)


def unweighted():
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])
    bf.set_topology(graph)
    return bf.neighbor_allreduce(torch.tensor([float(bf.rank())], dtype=torch.float64)).item()


def test_a_graph_without_weights_averages_over_the_in_neighbours():
    """Without edge weights a rank and its in-neighbours count alike."""
    expected = [(3 + 0) / 2, (0 + 1) / 2, (1 + 0 + 2) / 3, (2 + 3) / 2]
    assert LoopbackWorld(4).run(unweighted) == pytest.approx(expected, abs=1e-15)


# integers and bools


def rounds_half_to_even():
    x = torch.tensor([0, 2, 4, -2]) + bf.rank()
    return bf.neighbor_allreduce(x, round_integers=True).tolist()


@on("loopback-2", "mpi-2")
def test_integers_are_rounded_half_to_even(world):
    """0.5, 2.5, 4.5 and -1.5 become 0, 2, 4 and -2."""
    assert world.run(rounds_half_to_even) == [[0, 2, 4, -2]] * 2


INTEGERS = [row.dtype for row in DTYPES.values() if row.kind is DtypeKind.INTEGER]


def refused(dtype):
    with pytest.raises(bf.ArgumentError) as caught:
        bf.neighbor_allreduce(torch.ones(2, dtype=dtype))
    with pytest.raises(bf.ArgumentError):
        bf.neighbor_allreduce_nonblocking(torch.ones(2, dtype=dtype))
    return str(caught.value)


@on("loopback-2", "mpi-2")
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_the_average_of_integers_must_be_asked_for(world, dtype):
    """Without round_integers=True, integers raise ArgumentError in both forms of the verb."""
    name = str(dtype).removeprefix("torch.")
    assert set(world.run(refused, dtype)) == {
        f"neighbor_allreduce: the average of {name} values is no {name}; pass round_integers=True "
        "to round the average half to even, or cast to float first"
    }


@on("loopback-2", "mpi-2")
def test_bools_have_no_average(world):
    """Bools raise ArgumentError, which advises a cast to float and no rounding."""
    assert set(world.run(refused, torch.bool)) == {
        "neighbor_allreduce: the average of bool values is no bool; cast it to float first"
    }


def scaled_integers():
    """What integers cannot carry is refused on entry, whatever the size of the dtype."""
    peers = [rank for rank in range(bf.size()) if rank != bf.rank()]
    told = set()
    for dtype in INTEGERS:
        x = torch.full((3,), 3, dtype=dtype)
        arguments = {"self_weight": 0.5, "src_weights": dict.fromkeys(peers, 0.5)}
        with pytest.raises(bf.ArgumentError, match="dst_weights") as caught:
            bf.neighbor_allreduce(
                x, **arguments, dst_weights=dict.fromkeys(peers, 0.5), round_integers=True
            )
        told.add(str(caught.value).replace(str(dtype).removeprefix("torch."), "INT"))
        got = bf.neighbor_allreduce(x, **arguments, dst_weights=peers, round_integers=True)
        assert got.tolist() == [round(1.5 + 1.5 * len(peers))] * 3
    return told


@on("loopback-2", "mpi-2")
def test_integers_are_not_scaled_on_sending(world):
    """A factor other than 1 in dst_weights raises ArgumentError for every integer dtype."""
    for rank, told in enumerate(world.run(scaled_integers)):
        assert told == {
            "neighbor_allreduce: argument dst_weights: expected 1 for every rank, since INT values "
            f"are sent as they are, got {{{1 - rank}: 0.5}}; scale with src_weights, or cast to "
            "float first"
        }
