"""Verbs with ``compression=``: the formula, with the compressor applied by hand.

Rank r holds a tensor that follows from r. What it should get is formed on each rank from all ranks'
tensors, encoded as their senders encode them.
"""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.compression import compressor_for
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.tensors.means import first_divisor
from tests.support import LoopbackWorld, on
from tests.support.loops import on_each_rank
from tests.support.pairwise import pairs_of

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WIDE = {dtype: torch.float64 if dtype == torch.float64 else torch.float32 for dtype in FLOATS}
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 3, 11)]
LARGE = (70_001,)
"""Travels in several messages where it is not encoded."""
DETERMINISTIC = ("minmax_uint8", "fp16", "bf16", "sign", "top_k")
"""Compressors whose bytes follow from the tensor alone, so that any rank can compute them."""
CASES = [*pairs_of(SHAPES, DETERMINISTIC, FLOATS), (LARGE, "minmax_uint8", torch.float32)]
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6, torch.float64: 1e-12}


def held(rank, shape, dtype):
    generator = torch.Generator().manual_seed(17 * rank + 1)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def decoded(name, tensor, parts=1):
    """What the receivers of a tensor's equal parts decode."""
    codec, rows = TensorCompressor(compressor_for("test", name)), tensor.reshape(parts, -1)
    return codec.decode(codec.encode(rows), torch.empty_like(rows)).view(tensor.shape)


def padded(tensor, parts):
    """A tensor as so many rows, the last of which is filled up with zeros."""
    width = -(-tensor.numel() // parts)
    return torch.nn.functional.pad(tensor.flatten(), (0, parts * width - tensor.numel())).view(
        parts, width
    )


def sum_over(name, tensors, divisor, dtype):
    """Q(Σ Q(x) / d), with as many parts as tensors."""
    parts = len(tensors)
    total = sum(decoded(name, padded(one, parts), parts).to(WIDE[dtype]) for one in tensors)
    whole = decoded(name, (total / divisor).to(tensors[0].dtype), parts)
    return whole.flatten()[: tensors[0].numel()].view(tensors[0].shape)


def check(got, wanted, dtype):
    """Compare with a tolerance for sums in another order, which may turn a code."""
    assert got.dtype == dtype
    assert got.shape == wanted.shape
    if not got.numel():
        return
    scale = float(wanted.abs().max()) + 1e-3
    off = (got.double() - wanted.double()).abs() > 4 * TOLERANCES[dtype] * scale
    assert off.double().mean() <= 1e-3, f"{int(off.sum())} of {off.numel()} elements are off"
    torch.testing.assert_close(got.double(), wanted.double(), rtol=0, atol=0.05 * scale)


def check_same_on(group, got):
    every = bf.allgather(got.reshape(1, -1))
    assert all(torch.equal(every[rank], every[bf.rank()]) for rank in group), "ranks differ"


@on("loopback-2", "loopback-4", "mpi-2", "shared_memory-4")
@on_each_rank
def test_global_averages_and_sums():
    """allreduce and local_allreduce: Q(Σ Q(x) / d), with equal bits on all ranks."""
    n = bf.size()
    for shape, name, dtype in CASES:
        x, kept = held(bf.rank(), shape, dtype), held(bf.rank(), shape, dtype)
        for average in (True, False):
            wanted = x
            if x.numel():
                tensors = [held(rank, shape, dtype) for rank in range(n)]
                wanted = sum_over(name, tensors, n if average else 1, dtype)
            got = bf.allreduce(x, average=average, compression=name)
            check(got, wanted, dtype)
            check_same_on(range(n), got)
        got = bf.local_allreduce(x, average=False, compression=compressor_for("test", name))
        check(got, wanted, dtype)
        assert torch.equal(x, kept), "the input has changed"


@on("loopback-2", "loopback-4", "mpi-2", "shared_memory-4")
@on_each_rank
def test_weighted_averages_with_neighbours():
    """neighbor_allreduce and pair_gossip: the own tensor as it is, decoded ones of neighbours."""
    rank, n = bf.rank(), bf.size()
    bf.set_topology(topology.ring(n))
    near = topology.neighbors_of(bf.load_topology(), rank)
    after, before, peer = (rank + 1) % n, (rank - 1) % n, rank ^ 1
    for shape, name, dtype in CASES:
        x, wide = held(rank, shape, dtype), WIDE[dtype]

        def mixed(own, sources, factor=1.0, x=x, wide=wide):
            total = x.to(wide) * own
            for other, weight in sources.items():
                sent = held(other, x.shape, x.dtype) * factor
                received = decoded(name, sent) if sent.numel() else sent  # noqa: B023 - called here
                total = total + received.to(wide) * weight
            return total.to(x.dtype)

        got = bf.neighbor_allreduce(x, compression=name)
        check(got, mixed(near.self_weight, near.src_weights), dtype)
        weights = {"self_weight": 0.5, "src_weights": {before: 0.25}, "dst_weights": {after: 2.0}}
        got = bf.neighbor_allreduce(x, compression=name, **weights)
        check(got, mixed(0.5, {before: 0.25}, 2.0), dtype)
        got = bf.pair_gossip(x, peer, self_weight=0.25, pair_weight=0.75, compression=name)
        check(got, mixed(0.25, {peer: 0.75}), dtype)


def among_machines(per_machine):
    n = bf.size()
    machines = [range(i, min(i + per_machine, n)) for i in range(0, n, per_machine)]
    for shape, name, dtype in CASES:
        x = held(bf.rank(), shape, dtype)
        sums = [sum(held(r, shape, dtype).to(WIDE[dtype]) for r in group) for group in machines]
        for divisor in (n, 1):
            first = first_divisor(per_machine) if divisor > 1 else 1
            wanted = sum(sums) / divisor
            if len(machines) > 1 and x.numel():
                wanted = sum_over(name, [one / first for one in sums], divisor / first, dtype)
            got = bf.hierarchical_allreduce(x, average=divisor > 1, compression=name)
            check(got, wanted.to(dtype), dtype)
            check_same_on(range(n), got)


@pytest.mark.parametrize("per_machine", [1, 2, 3])
def test_global_averages_among_machines(per_machine):
    """hierarchical_allreduce: sums of machines, which may differ in size, travel encoded.

    Those of an average are divided by a power of two first.
    """
    settings = {"ranks_per_machine": per_machine}
    LoopbackWorld(4).run(among_machines, per_machine, settings=settings)


@on("shared_memory-4")
def test_processes_among_machines(world):
    """The same between processes, of which one is a machine of its own."""
    world.run(among_machines, 3, settings={"ranks_per_machine": 3})


@on("loopback-4", "mpi-4")
@on_each_rank(settings={"ranks_per_machine": 2})
def test_weighted_averages_between_machines():
    """hierarchical_neighbor_allreduce: each rank's share of the machine's mean travels encoded."""
    bf.set_machine_topology(topology.ring(bf.machine_size()))
    near = topology.neighbors_of(bf.load_machine_topology(), bf.machine_rank())
    local, place = bf.local_size(), bf.machine_rank()
    for shape, name, dtype in CASES:

        def mean(machine, shape=shape, dtype=dtype):
            members = range(machine * local, (machine + 1) * local)
            return sum(held(rank, shape, dtype).to(WIDE[dtype]) for rank in members) / local

        wanted = mean(place) * near.self_weight
        for machine, weight in near.src_weights.items():
            shares = mean(machine).reshape(-1).tensor_split(local)
            received = torch.cat([decoded(name, one) if one.numel() else one for one in shares])
            wanted = wanted + received.view(shape) * weight
        got = bf.hierarchical_neighbor_allreduce(held(bf.rank(), shape, dtype), compression=name)
        check(got, wanted.to(dtype), dtype)
        check_same_on(range(place * local, (place + 1) * local), got)


def sums_of_others():
    """Without compression: any dtype, as allreduce has it."""
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float16):
        for shape in SHAPES:
            x = (10 * held(bf.rank(), shape, torch.float64)).abs().to(dtype)
            got = bf.hierarchical_allreduce(x, average=False)
            wanted = bf.allreduce(x, average=False)
            assert got.dtype == dtype
            torch.testing.assert_close(got, wanted)
    whole = torch.tensor([bf.rank(), 7])
    got = bf.hierarchical_allreduce(whole, round_integers=True)
    assert torch.equal(got, bf.allreduce(whole, round_integers=True))


@on("loopback-4", "shared_memory-4")
@pytest.mark.parametrize("per_machine", [2, 3])
def test_hierarchical_sums_of_other_dtypes(world, per_machine):
    """hierarchical_allreduce gives what allreduce gives, also for integers, bools and complex."""
    world.run(sums_of_others, settings={"ranks_per_machine": per_machine})
