"""``communication_buffer_in_mb``: buckets in pieces give the same bits, in the memory allowed."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import asyncddp as bf
from asyncddp import topology
from asyncddp.shm.buddy_allocator import BuddyAllocator
from asyncddp.tensors import allocation
from tests.support import LoopbackWorld, on
from tests.support.pairwise import pairwise
from tests.unit.optim.optim_reference import vector

WHOLE = 1000.0  # MiB: all buckets travel whole
HEADER = 1 << 12  # bytes of a ring buffer besides its slots, at most
METHODS = {
    "AWC": ("adapt_with_combine", {}),
    "ATC": ("adapt_then_combine", {}),
    "ATC in backward": ("adapt_then_combine", {"update_in_backward": True}),
}
FAMILIES = {"one peer": topology.one_peer_exponential, "ring": topology.ring}
by_method = pytest.mark.parametrize("method", METHODS)
some_worlds = on("loopback-4")


def made(method, megabytes, graph=None, *, layers=6, width=128, dtype=torch.float32, **options):
    """A model of layers² of float32, 0.4 MiB unless said otherwise, and its optimizer."""
    algorithm, own = METHODS[method]
    generator = torch.Generator().manual_seed(bf.rank())
    model = nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(layers)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 16)
    optimizer = bf.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model,
        algorithm,
        topology=graph,
        communication_buffer_in_mb=megabytes,
        **{**own, **options},
        broadcast=False,
    )
    return model, optimizer


def data_of(model, step):
    first = next(model.parameters())
    generator = torch.Generator().manual_seed(100 * bf.rank() + step)
    return torch.randn(2, first.shape[1], generator=generator).to(first.dtype)


def backward(model, step):
    model(data_of(model, step)).square().mean().backward()


def trained(method, megabytes, graph, *, batches=4, passes=1, halfway=None, **options):
    """The parameters after some batches, and the bytes of a piece."""
    model, optimizer = made(method, megabytes, graph, num_steps_per_communication=passes, **options)
    with bf.join(optimizer) if isinstance(batches, tuple) else nullcontext():
        for step in range(batches[bf.rank()] if isinstance(batches, tuple) else batches):
            optimizer.zero_grad()
            for part in range(passes):
                backward(model, passes * step + part)
            optimizer.step()
            if step == 1 and halfway is not None:
                halfway(model, optimizer)
    return vector(model), optimizer._averager.piece_bytes


def assert_same_bits(world, *args, megabytes=0.25, **options):
    """In pieces as whole, to the last bit; the one really in pieces, the other not."""
    whole = world.run(trained, args[0], WHOLE, *args[1:], **options)
    pieces = world.run(trained, args[0], megabytes, *args[1:], **options)
    for (one, unsplit), (other, piece) in zip(whole, pieces, strict=True):
        assert unsplit is None
        assert piece <= megabytes * 2**20 / 8
        assert torch.equal(one, other)


@pairwise(
    world=["loopback-4", "shared_memory-4"],
    method=list(METHODS),
    family=list(FAMILIES),
    bucket=[25, 0.1],
)
def test_same_bits(world, method, family, bucket):
    """One large bucket, and several that are no multiples of a piece."""
    assert_same_bits(world, method, FAMILIES[family](4), bucket_size_in_mb=bucket)


@some_worlds
@by_method
def test_same_bits_in_halves(world, method):
    """Sums of halves are formed in float32, piece by piece as well."""
    half = {"dtype": torch.bfloat16, "layers": 12}
    assert_same_bits(world, method, topology.ring(4), **half)


@some_worlds
@by_method
def test_same_bits_by_accumulation(world, method):
    """Two backward passes to a step, which average once."""
    assert_same_bits(world, method, topology.one_peer_exponential(4), passes=2)


@some_worlds
@pytest.mark.parametrize("method", ["AWC", "ATC"])
def test_same_bits_where_ranks_join(world, method):
    """Ranks that are done count the pieces of those who train, and take part again afterwards."""
    assert_same_bits(world, method, topology.ring(4), batches=(2, 5, 3, 4))


def set_weights(model, optimizer):
    """From now on receivers give weights, and senders factors that differ."""
    del model
    rank, size = bf.rank(), bf.size()
    optimizer.self_weight = 0.5
    optimizer.src_weights = {(rank - 1) % size: 0.25, (rank + 1) % size: 0.25}
    optimizer.dst_weights = {(rank - 1) % size: 0.5, (rank + 1) % size: 2.0}


@some_worlds
@by_method
def test_same_bits_with_weights_by_hand(world, method):
    """Scaled tensors go by message, also between ranks that share memory."""
    assert_same_bits(world, method, topology.ring(4), halfway=set_weights)


def start_anew(model, optimizer):
    """Drop a round of which some pieces are under way, and load other parameters."""
    saved = {name: value / 2 for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    optimizer.zero_grad()
    model(data_of(model, 50))  # AWC sends here
    model.load_state_dict(saved)
    optimizer.load_state_dict(state)


@some_worlds
@by_method
def test_same_bits_after_a_dropped_round(world, method):
    """Ranks count pieces alike, though each had room for other numbers of them."""
    assert_same_bits(world, method, topology.star(4), halfway=start_anew)


@some_worlds
def test_same_bits_of_machines(world):
    """Two machines of two ranks each: pieces through rings inside, by message between."""
    graph = topology.exponential_two(4)
    settings = {"ranks_per_machine": 2}
    for method in METHODS:
        whole = world.run(trained, method, WHOLE, graph, settings=settings)
        pieces = world.run(trained, method, 0.25, graph, settings=settings)
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(whole, pieces, strict=True))


# memory


@contextmanager
def counted():
    """Most bytes allocated in the block at a time, but for what was there before."""
    found, sizes, lock = {"now": 0, "most": 0}, {}, threading.Lock()
    take, give, large = BuddyAllocator.take, BuddyAllocator.give, allocation._LARGE

    def counted_take(self, size):
        block = take(self, size)
        with lock:
            sizes[id(block)] = size
            found["now"] += size
            found["most"] = max(found["most"], found["now"])
        return block

    def counted_give(self, block):
        with lock:
            found["now"] -= sizes.pop(id(block), 0)
        give(self, block)

    BuddyAllocator.take, BuddyAllocator.give = counted_take, counted_give
    allocation._LARGE = 0  # also small tensors are taken from the arena
    try:
        yield found
    finally:
        BuddyAllocator.take, BuddyAllocator.give = take, give
        allocation._LARGE = large


def bytes_beyond_buckets(method, megabytes, family, layers):
    """Most bytes of messages and ring buffers in four steps, and those of the model."""
    graph = FAMILIES[family](bf.size())
    with counted() as found:
        model, optimizer = made(method, megabytes, graph, layers=layers, width=256)
        found["most"] = before = found["now"]  # shared buckets
        for step in range(4):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        bf.barrier()
    return found["most"] - before, sum(one.nbytes for one in model.parameters())


@pairwise(
    world=["mpi-2", "shared_memory-4"],
    method=list(METHODS),
    family=list(FAMILIES),
    megabytes=[0.25, 0.5],
)
def test_memory_has_the_limit(world, method, family, megabytes):
    """Messages under way and ring buffers together take what is allowed: a quarter of a model."""
    for most, model in world.run(bytes_beyond_buckets, method, megabytes, family, 8):
        assert most <= megabytes * 2**20 + HEADER
        assert most <= model / 4 * (megabytes / 0.5) + HEADER
        assert most > 0


@pytest.mark.nightly
@pairwise(world=["shared_memory-4"], method=list(METHODS), family=list(FAMILIES))
def test_memory_by_default_where_all_share_it(world, method, family):
    """At most 4 MiB, whatever the model's size."""
    for most, model in world.run(bytes_beyond_buckets, method, None, family, 24):
        assert most <= 4 * 2**20
        assert most <= model


@on("mpi-4")
@by_method
def test_memory_by_default_between_machines(world, method):
    """At most one model, with one peer at a time."""
    for most, model in world.run(bytes_beyond_buckets, method, None, "one peer", 8):
        assert most <= model * 1.01


# mistakes


def refused(method, **options):
    model = nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    bf.DistributedOptimizer(plain, model, method, **options)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("adapt_then_combine", {"communication_buffer_in_mb": 0}, "a number of at least 0.25"),
        ("adapt_then_combine", {"communication_buffer_in_mb": "8"}, "a number of at least 0.25"),
        ("gradient_allreduce", {"communication_buffer_in_mb": 8}, "gradient_allreduce travel"),
        ("choco_sgd", {"communication_buffer_in_mb": 8}, "choco_sgd travel whole"),
        ("win_put", {"communication_buffer_in_mb": 8}, "win_put travel whole"),
        (
            "adapt_then_combine",
            {"communication_buffer_in_mb": 8, "compression": "fp16", "plain_compression": True},
            "without compression",
        ),
    ],
)
def test_a_buffer_that_cannot_be(method, options, words):
    """The error names the argument, what was expected and what it got."""
    for outcome in LoopbackWorld(2).outcomes(partial(refused, method, **options)):
        assert outcome.error == "ArgumentError"
        assert "communication_buffer_in_mb" in outcome.message
        assert words in outcome.message


def test_other_buffers_on_other_ranks():
    """Ranks would cut other pieces: an error on all ranks, where the wrapper is made."""

    def case():
        refused("adapt_then_combine", communication_buffer_in_mb=4 + bf.rank())

    for outcome in LoopbackWorld(2).outcomes(case):
        assert outcome.error == "MismatchError"
        assert "communication buffer" in outcome.message
