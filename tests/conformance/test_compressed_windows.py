"""Windows whose tensors are encoded: what is read is what the compressor makes of what was put."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.compression import COMPRESSORS, compressor_for
from asyncddp.compression.tensor_compressor import TensorCompressor
from tests.support import LoopbackWorld, on
from tests.support.loops import on_each_rank

SIZE = 1000
DETERMINISTIC = [name for name in COMPRESSORS if not name.startswith(("qsgd", "random", "power"))]


def values_of(rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64).to(dtype)


def decoded(x, name):
    """What the compressor makes of a tensor."""
    codec = TensorCompressor(compressor_for("test", name))
    return codec.decode(codec.encode(x.view(1, -1)), torch.empty(1, SIZE, dtype=x.dtype)).view(-1)


def put_and_update(name, dtype):
    """A put, an update, and a get, compared with the formula."""
    bf.set_topology(topology.ring(bf.size()))
    x = values_of(bf.rank(), dtype)
    assert bf.win_create(x, "x", zero_init=True, compression=name)
    others = {j: decoded(values_of(j, dtype), name) for j in bf.in_neighbor_ranks()}
    bf.win_put(x, "x")
    bf.barrier()
    for j, other in others.items():
        torch.testing.assert_close(bf.win_read_neighbor("x", j), other, rtol=0, atol=0)
    share = 1.0 / (len(others) + 1)
    mean = sum(others.values(), x.double()) * share
    found = bf.win_update("x", share, dict.fromkeys(others, share), clone=True)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, mean.to(dtype), rtol=tolerance, atol=tolerance)
    bf.barrier()
    bf.win_get("x", dict.fromkeys(others, 0.5))
    for j, other in others.items():
        torch.testing.assert_close(bf.win_read_neighbor("x", j), other * 0.5, rtol=1e-6, atol=1e-6)
    bf.barrier()


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_what_is_read_is_what_the_compressor_keeps(name):
    """Puts, updates and gets of a window use decoded tensors; the own one counts as it is."""
    LoopbackWorld(3).run(put_and_update, name, torch.float32)


@on("loopback-4", "shared_memory-2", "mpi-2")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_on_every_transport_and_dtype(world, dtype):
    """Between machines encoded bytes travel, within one they lie in shared memory."""
    settings = {"ranks_per_machine": 2} if world.size == 4 else {}
    world.run(put_and_update, "minmax_uint8", dtype, settings=settings)


@on_each_rank(ranks=2)
def test_a_window_starts_with_the_own_tensor():
    """Without zero_init buffers begin as what the compressor keeps of the own tensor."""
    x = values_of(bf.rank())
    bf.win_create(x, "x", compression="bf16")
    torch.testing.assert_close(bf.win_read_neighbor("x", 1 - bf.rank()), decoded(x, "bf16"))


@on_each_rank(ranks=2)
def test_what_a_compressed_window_cannot_do():
    """The message names the window, the compressor, and what to do instead."""
    x = values_of(bf.rank())
    with pytest.raises(bf.DtypeError, match=r"win_create: compression expects .*int64"):
        bf.win_create(torch.ones(3, dtype=torch.int64), "i", compression="bf16")
    with pytest.raises(bf.UnknownNameError, match=r"unknown compressor 'bf61'; .* 'bf16'\?"):
        bf.win_create(x, "u", compression="bf61")
    bf.win_create(x, "x", compression="sign")
    words = r"win_accumulate: window 'x' holds tensors encoded by Sign\(.*expected win_put"
    with pytest.raises(bf.ArgumentError, match=words):
        bf.win_accumulate(x, "x")
    bf.win_put(x, "x")


def different():
    bf.win_create(values_of(0), "x", compression="bf16" if bf.rank() else "fp16")


def test_ranks_with_different_compressors_are_told():
    """On all ranks, with both."""
    for outcome in LoopbackWorld(2).outcomes(different):
        assert "MismatchError" in outcome.bases
        assert "FP16()" in outcome.message
        assert "BF16()" in outcome.message
