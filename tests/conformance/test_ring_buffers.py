"""Averages through ring buffers give ``(W @ X)[r]``: names used before, on one machine.

The first exchange of a name goes by message, the second one offers a ring buffer, and from the
third one on tensors go through it. Every case here repeats itself often enough, and says so where
not.
"""

from __future__ import annotations

import functools
import random
import threading
import time

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.engine import persistent_channels as channels
from tests.support import on, oracle
from tests.support.loops import on_each_rank
from tests.support.oracle import LAYOUTS, check, mixed, options
from tests.support.pairwise import pairs_of, pairwise
from tests.support.small_chunks import in_small_chunks

NEAR = on("shared_memory-4")
USES = 6
CHUNK = 1 << 11
"""Elements of 4 bytes in a chunk of a tensor below 512 KiB, in :func:`in_small_chunks`."""

held = functools.lru_cache(maxsize=64)(oracle.held)
"""Nobody writes into these."""

GRAPHS = {
    "ring": topology.ring,
    "directed ring": lambda n: topology.ring(n, style="right"),
    "star": topology.star,
    "complete": topology.complete,
    "exponential_two": topology.exponential_two,
    "one_peer_exponential": topology.one_peer_exponential,
}


def set_graph(name):
    bf.set_topology(GRAPHS[name](bf.size()))


def row(k=0):
    """This rank's weights in round k."""
    return topology.neighbors_of(bf.load_topology(), bf.rank(), k)


def through_rings(name, k=0):
    """Whether round k of a name would go through ring buffers now."""
    near = row(k)
    every = bf.current().engine.matcher.channels.find_all(name)
    return any(channel.serves(near.src_weights, near.dst_ranks) for channel in every)


# where tensors lie


def ordinary(x):
    return x.clone()


def shared(x):
    return bf.empty_shared(x.shape, dtype=x.dtype).copy_(x)


def shared_slice(x):
    """A part of a larger shared tensor, not at its beginning."""
    whole = bf.empty_shared((x.numel() + 7,), dtype=x.dtype)
    return whole[3 : 3 + x.numel()].view(x.shape).copy_(x)


def strided(x):
    return torch.stack([x, x], dim=-1)[..., 0] if x.numel() > 1 else x.clone()


def shared_strided(x):
    if x.numel() < 2:
        return shared(x)
    return bf.empty_shared((*x.shape, 2), dtype=x.dtype)[..., 1].copy_(x)


PLACES = {
    "ordinary": ordinary,
    "shared": shared,
    "slice of shared": shared_slice,
    "strided": strided,
    "shared strided": shared_strided,
}

FORMS = ["blocking", "in place", "out", "nonblocking", "nonblocking in place"]


def average(form, x, name, out=None, **more):
    """One use of a form; what is not averaged in place must be as it was, and may change at once.

    A tensor is spoilt as soon as the verb has returned, while neighbours may not have come yet.
    """
    before = x.clone()
    if form == "in place":
        got = bf.neighbor_allreduce_(x, name=name, **more)
    elif form == "nonblocking in place":
        got = bf.neighbor_allreduce_nonblocking_(x, name=name, **more).wait()
    elif form == "nonblocking":
        got = bf.neighbor_allreduce_nonblocking(x, name=name, out=out, **more).wait()
    else:
        got = bf.neighbor_allreduce(x, name=name, out=out, **more)
    if "in place" in form:
        assert got is x
        return got.clone()
    assert torch.equal(x, before), "the argument has changed"
    assert out is None or got is out
    result = got.clone()
    x.fill_(torch.nan if x.is_floating_point() else 100)
    return result


def checked(form, shape, dtype, seed, name, place=ordinary, out=None, k=0):
    """One use, on other values than the two uses before it, against the oracle."""

    def of(rank):
        return held(rank, shape, dtype, seed=seed % 3)

    near = row(k)
    x = place(of(bf.rank()))
    got = average(form, x, name, out, **options(dtype))
    check(got, of(bf.rank()), mixed(bf.rank(), near.self_weight, near.src_weights, of))


def lag(mine, most=0.002):
    """Come late now and then, so that the engine takes over here or at the neighbours."""
    if mine.random() < 0.2:
        time.sleep(most * mine.random())


# forms, layouts, dtypes, sizes


def in_form(form, place, shapes):
    mine = random.Random(bf.rank())
    made = PLACES[place]
    for shape in shapes:
        name = f"{form} {shape}"
        for k in range(USES):
            out = None
            if form == "out":  # a tensor as above, or of any other kind
                other = list(PLACES.values())[k % len(PLACES)]
                out = other(torch.full(shape, torch.nan))
            lag(mine)
            checked(form, shape, torch.float32, k, name, made, out)
        assert through_rings(name) == (0 not in shape)


@pairwise(form=FORMS, place=PLACES.keys(), world=["shared_memory-2", "shared_memory-4"])
def test_every_form_wherever_the_tensor_lies(world, form, place):
    """Nothing but the values counts, and the tensor may be written over once the verb is back."""
    world.run(
        in_small_chunks, in_form, form, place, [(), (0,), (5,), (3, 4), (CHUNK + 1,), (150, 15)]
    )


@on("loopback-2", "mpi-2", "shared_memory-2")
@on_each_rank
def test_a_strided_view_of_one_element_or_none():
    """Torch calls it contiguous whatever its stride says."""
    for name, x in (("one", torch.ones(1, 2)[:, 0]), ("none", torch.ones(0, 2)[:, 0])):
        assert x.is_contiguous()
        assert bf.neighbor_allreduce(x, name=name).tolist() == x.tolist()


SOURCES = {0: [1], 1: [0, 3], 2: [1], 3: [1]}
TARGETS = {0: [1], 1: [0, 2, 3], 2: [], 3: [1]}


def read_late(shape):
    """Rank 1 has all that it waits for, and rank 2 comes late to read rank 1's tensor."""
    me = bf.rank()
    weights = {
        "self_weight": 0.5,
        "src_weights": dict.fromkeys(SOURCES[me], 0.5 / len(SOURCES[me])),
        "dst_weights": TARGETS[me],
    }
    x = bf.empty_shared(shape, dtype=torch.float32)
    for k in range(8):

        def of(rank, k=k):
            return held(rank, shape, torch.float32, seed=k)

        x.copy_(of(me))
        if me == 2 and k >= 4:
            time.sleep(0.1)
        got = bf.neighbor_allreduce(x, name="w", **weights)
        x.fill_(torch.nan)
        check(got, of(me), mixed(me, 0.5, weights["src_weights"], of))


@on("shared_memory-4")
@pytest.mark.parametrize("shape", [(5,), (CHUNK,), (5 * CHUNK + 1,)])
def test_a_shared_tensor_may_be_written_over_once_the_verb_is_back(world, shape):
    """However late a neighbour reads it, which it does where it lies."""
    world.run(in_small_chunks, read_late, shape)


def in_dtype(dtype):
    mine = random.Random(bf.rank())
    set_graph("ring")
    shapes, forms = [(), (7,), (2 * CHUNK + 1,)], ("blocking", "in place", "nonblocking")
    for shape, place, form in pairs_of(shapes, (ordinary, shared), forms):
        name = f"{form} {shape}"
        for k in range(4):
            lag(mine)
            checked(form, shape, dtype, k, name, place)


@NEAR
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.int64,
        torch.int8,
        torch.uint8,
    ],
    ids=str,
)
def test_every_kind_of_dtype(world, dtype):
    """Wide and narrow floats, complex numbers, integers that are rounded."""
    world.run(in_small_chunks, in_dtype, dtype)


def in_layouts():
    for name, layout in LAYOUTS.items():
        for k in range(USES):

            def of(rank, k=k):
                return held(rank, (4, 6), torch.float32, seed=k)

            near = row()
            expected = mixed(bf.rank(), near.self_weight, near.src_weights, of)
            x = layout(of(bf.rank()).clone())
            check(bf.neighbor_allreduce(x, name=name), x, expected)
            got = bf.neighbor_allreduce_(x, name=name)
            check(got.detach(), x, expected)


@NEAR
def test_every_layout(world):
    """Views of all sorts, and parameters that require gradients."""
    world.run(in_small_chunks, in_layouts)


def cut_in(sizes, dtype, places):
    for size, place, form in pairs_of(sizes, places, ("blocking", "in place")):
        for k in range(4):
            checked(form, (size,), dtype, k, f"{form} {size}", PLACES[place])
        assert through_rings(f"{form} {size}")


@NEAR
@pytest.mark.parametrize(
    "sizes",
    [
        (CHUNK - 1, CHUNK, CHUNK + 1),
        (4 * CHUNK, 4 * CHUNK + 1, 5 * CHUNK - 1, 9 * CHUNK + 5),
        ((1 << 17) - 1, (1 << 17) + 1),
    ],
    ids=["one piece", "more pieces than slots", "another size of pieces"],
)
def test_sizes_around_the_cuts(world, sizes):
    """One element more or less than whole pieces, and than the slots of a ring."""
    world.run(in_small_chunks, cut_in, sizes, torch.float32, ("ordinary", "shared"))


@on("shared_memory-2")
@pytest.mark.parametrize("place", ["ordinary", "slice of shared"])
@on_each_rank
def test_a_tensor_in_pieces_of_a_megabyte(place):
    """From 32 MiB on; the last piece is a single number.

    Whole numbers, of which sums and halves are exact.
    """
    lying = torch.arange((1 << 23) + 1, dtype=torch.float32).remainder_(1000)
    x = PLACES[place](lying)
    for k in range(4):
        x.copy_(lying).add_(bf.rank() + k)
        assert bf.neighbor_allreduce_(x, name="w") is x
        assert torch.equal(x, lying + (0.5 + k))
        x.copy_(lying).add_(bf.rank() + k)
        assert torch.equal(bf.neighbor_allreduce(x, name="w"), lying + (0.5 + k))
        bf.barrier()
    assert through_rings("w")


# graphs and weights


def on_graph(name):
    mine = random.Random(bf.rank())
    set_graph(name)
    for shape in [(), (5,), (CHUNK,), (CHUNK + 1,), (5 * CHUNK + 3,)]:
        uses = 8 if shape in [(), (5,)] else 4
        for place in (ordinary, shared):
            for k in range(uses):
                lag(mine)
                form = "in place" if k % 2 else "blocking"
                round_ = k + (0 if place is ordinary else uses)
                checked(form, shape, torch.float32, round_, f"{shape}", place, k=round_)
        assert through_rings(f"{shape}", 0)
        assert through_rings(f"{shape}", 1)


@on("shared_memory-2", "shared_memory-4")
@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph(world, name):
    """Fixed graphs, symmetric or not, and one whose neighbour changes with every use."""
    world.run(in_small_chunks, on_graph, name)


def factor(source, target, alike):
    """With what a rank multiplies what it sends to another."""
    return 0.5 + source if alike else 1.0 + source + 0.25 * target


def by_hand(alike):
    n, me = bf.size(), bf.rank()
    others = [rank for rank in range(n) if rank != me]
    src = {rank: 0.1 + 0.2 * rank for rank in others}
    dst = {rank: factor(me, rank, alike) for rank in others}
    shapes, forms = [(), (5,), (CHUNK + 1,), (5 * CHUNK,)], ("blocking", "in place", "nonblocking")
    for shape, place, form in pairs_of(shapes, (ordinary, shared, shared_strided), forms):
        for k in range(4):

            def of(rank, k=k, shape=shape):
                return held(rank, shape, torch.float32, seed=k)

            x = place(of(me))
            weights = {"self_weight": 0.3, "src_weights": src, "dst_weights": dst}
            got = average(form, x, f"{shape}", **weights)
            sent = mixed(me, 0.3, src, of, lambda s, t: factor(s, t, alike))
            check(got, of(me), sent)


@NEAR
@pytest.mark.parametrize("alike", [True, False], ids=["one factor", "many factors"])
def test_weights_and_factors_by_hand(world, alike):
    """A tensor that is scaled on its way goes through slots, or by message where factors differ."""
    world.run(in_small_chunks, by_hand, alike)


def one_way():
    """Rank 0 sends to all, and receives from nobody; then the other way round."""
    n, me = bf.size(), bf.rank()
    others = list(range(1, n))
    for shape in [(5,), (CHUNK + 1,), (6 * CHUNK,)]:
        for place in (ordinary, shared):
            for k in range(8):

                def of(rank, k=k, shape=shape):
                    return held(rank, shape, torch.float32, seed=k)

                out = {"self_weight": 1.0, "src_weights": {}, "dst_weights": others}
                into = {"self_weight": 0.25, "src_weights": {0: 0.75}, "dst_weights": []}
                form = "in place" if k % 2 else "blocking"
                given = out if me == 0 else into
                got = average(form, place(of(me)), f"{shape}", **given)
                check(got, of(me), mixed(me, given["self_weight"], given["src_weights"], of))


@NEAR
def test_what_goes_one_way_only(world):
    """A sender that expects nothing is not ahead of its readers by more than the ring holds."""
    world.run(in_small_chunks, one_way)


# names, forms and shapes that change


def interleaved():
    mine = random.Random(bf.rank())
    names = [f"layer {k}" for k in range(7)]
    for k in range(12):
        for number, name in enumerate(names):
            if number % 3 == 0:
                lag(mine)
            checked("in place" if number % 2 else "blocking", (number,), torch.float32, k, name)


@NEAR
def test_several_names_in_turn(world):
    """Seven names in turn, some in place, give the right average in each of twelve rounds."""
    world.run(in_small_chunks, interleaved)


def changing_shapes():
    mine, shapes = random.Random(bf.rank()), [(5,), (), (CHUNK + 1,), (5, 1), (2,)]
    for k in range(30):
        lag(mine)
        form = FORMS[0] if k % 3 else FORMS[1]
        place = shared if k % 2 else ordinary
        dtype = torch.float64 if k % 4 == 0 else torch.float32
        checked(form, shapes[k * 7 % 5 if k < 20 else k % 2], dtype, k, "w", place)


@NEAR
def test_one_name_with_changing_shapes_and_dtypes(world):
    """Every signature has ring buffers of its own; uses of a name are counted over all of them."""
    world.run(in_small_chunks, changing_shapes)


def changing_forms():
    mine = random.Random(bf.rank())
    for k in range(40):
        lag(mine)
        form, place = mine.choice(FORMS), mine.choice(list(PLACES.values()))
        for shape in [(6,), (CHUNK + 2,)]:
            checked(form, shape, torch.float32, k, f"w {shape}", place)


@NEAR
def test_each_rank_in_forms_of_its_own(world):
    """Neighbours need not know whether a tensor is shared, averaged in place, or waited for."""
    world.run(in_small_chunks, changing_forms)


def under_way():
    """Several uses of a name at once, waited for in any order, and a blocking one after them."""
    mine = random.Random(bf.rank())
    near = row()
    for turn in range(5):
        for shape in [(4,), (2 * CHUNK + 1,)]:

            def of(rank, k, shape=shape):
                return held(rank, shape, torch.float64, seed=k)

            seeds = [10 * turn + k for k in range(5)]
            handles = [
                bf.neighbor_allreduce_nonblocking(of(bf.rank(), k), name=f"{shape}") for k in seeds
            ]
            last = seeds[-1] + 1
            blocking = bf.neighbor_allreduce(of(bf.rank(), last), name=f"{shape}")
            got = [*zip(seeds, handles, strict=True)]
            mine.shuffle(got)
            values = [(last, blocking), *((k, handle.wait()) for k, handle in got)]
            for k, value in values:
                weights = near.self_weight, near.src_weights
                want = mixed(bf.rank(), *weights, lambda rank, k=k: of(rank, k))
                check(value, value, want)


@NEAR
def test_uses_under_way_at_once_keep_their_order(world):
    """Uses of a name under way at once match by number, beside a blocking use as well."""
    world.run(in_small_chunks, under_way)


def now_and_then_confirmed():
    for k in range(12):
        x = held(bf.rank(), (5,), torch.float64, seed=k)
        got = bf.neighbor_allreduce(x, name="w", check=k % 3 == 2)
        near = row()
        of = [held(r, (5,), torch.float64, seed=k) for r in range(bf.size())]
        check(got, x, mixed(bf.rank(), near.self_weight, near.src_weights, of.__getitem__))


@NEAR
def test_uses_that_ask_for_confirmation_between_others(world):
    """check=True in every third use of a name leaves all results right."""
    world.run(in_small_chunks, now_and_then_confirmed)


def leaf():
    """A parameter as the user holds it."""
    near = row()
    for shape in [(3,), (CHUNK + 1,)]:
        for place in (ordinary, shared):
            parameter = torch.nn.Parameter(place(torch.zeros(shape, dtype=torch.float64)))
            for k in range(USES):
                of = [held(r, shape, torch.float64, seed=k) for r in range(bf.size())]
                want = mixed(bf.rank(), near.self_weight, near.src_weights, of.__getitem__)
                with torch.no_grad():
                    parameter.copy_(of[bf.rank()])
                got = bf.neighbor_allreduce(parameter, name=f"{shape}")
                check(got, parameter, want)
                assert torch.equal(parameter, of[bf.rank()])
                assert bf.neighbor_allreduce_(parameter, name=f"{shape}") is parameter
                check(parameter.detach(), parameter, want)
                assert parameter.requires_grad
                assert parameter.is_leaf


@NEAR
def test_a_leaf_that_requires_gradients(world):
    """The result has no history; in place the parameter stays the leaf that it was."""
    world.run(in_small_chunks, leaf)


def by_threads():
    """Two threads of every rank, each with a name of its own."""
    problems = []

    def loop(name, count):
        try:
            for k in range(count):
                checked("in place" if k % 2 else "blocking", (50,), torch.float64, k, name)
        except (AssertionError, bf.AsyncDDPError) as error:
            problems.append(error)

    threads = [threading.Thread(target=loop, args=(f"thread {k}", 60)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


@NEAR
def test_two_threads_of_each_rank(world):
    """A blocking verb of one thread beside that of another."""
    world.run(in_small_chunks, by_threads)


def scarce(most):
    """Rank 0 has memory for a few ring buffers only; a neighbour need not know."""
    before = channels._MAX_RINGS, channels._MAX_RING_BYTES
    if bf.rank() == 0:
        channels._MAX_RINGS, channels._MAX_RING_BYTES = most
    try:
        for name in ("a", "b", "c"):
            for k in range(USES):
                checked("in place", (9,), torch.float64, k, name)
                checked("blocking", (CHUNK + 1,), torch.float64, k, name, shared)
        return [through_rings(name) for name in ("a", "b", "c")]
    finally:
        channels._MAX_RINGS, channels._MAX_RING_BYTES = before


@NEAR
@pytest.mark.parametrize("most", [(0, 1 << 28), (2, 1 << 28), (2048, 1 << 14)])
def test_a_rank_without_room_for_more_ring_buffers_goes_by_message(world, most):
    """What does not go through ring buffers goes by message, to and from the same neighbours."""
    served = world.run(in_small_chunks, scarce, most)
    assert served[0][0] == (most[0] > 0)
    assert not served[0][2] or most[1] < 1 << 28


def overlapping(size):
    """The result is written where a part of the argument lies, one element further."""
    n, me = bf.size(), bf.rank()
    bf.set_topology(topology.complete(n))
    want = torch.arange(size, dtype=torch.float32) + 500 * (n - 1)
    for verb in (bf.neighbor_allreduce, bf.allreduce):
        for _ in range(USES):
            base = torch.arange(size + 1, dtype=torch.float32) + 1000 * me
            assert torch.allclose(verb(base[:-1], name="over", out=base[1:]), want)


@NEAR
@pytest.mark.parametrize("size", [5, 3 * CHUNK])
def test_a_result_may_overlap_its_argument(world, size):
    """out= may begin one element further on in the argument's own memory."""
    world.run(in_small_chunks, overlapping, size)
