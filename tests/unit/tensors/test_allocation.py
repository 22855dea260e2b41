"""What the library makes is an ordinary tensor, whatever torch is switched to around a call."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

import asyncddp as bf
from asyncddp.shm.arena import Arena, InProcessArena
from asyncddp.tensors import allocation as allocate
from asyncddp.tensors.buckets import FlatBucket
from asyncddp.tensors.byte_views import from_bytes
from tests.support.simulated_streams import SimulatedStreams


@contextlib.contextmanager
def default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "device": lambda: torch.device("meta"),
    "dtype": default_dtype,
    "deterministic": deterministic,
}
LIKE = torch.ones(2, 3)
MADE = {
    "empty": lambda: allocate.empty((2, 3), torch.float32),
    "large": lambda: allocate.empty((1 << 19,), torch.float32),
    "empty_like": lambda: allocate.empty_like(LIKE),
    "zeros": lambda: allocate.zeros((2, 3), torch.float32),
    "zeros_like": lambda: allocate.zeros_like(LIKE),
    "detached_copy": lambda: allocate.detached_copy(LIKE),
    "make_tensor": lambda: allocate.make_tensor([1.0, 2.0], torch.float32),
    "shared": lambda: Arena().empty((2, 3), torch.float32),
    "private": lambda: InProcessArena().empty((2, 3), torch.float32),
    "bucket": lambda: FlatBucket([LIKE]).flat,
    "view": lambda: FlatBucket([LIKE]).views[0],
    "bytes": lambda: from_bytes(bytes(8), torch.float32, (2,)),
    "exportable": lambda: SimulatedStreams().allocate_exportable(64),
    "pinned": lambda: SimulatedStreams().allocate_pinned(64),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MADE)
def test_what_is_made_in_a_mode_is_an_ordinary_tensor(mode, kind):
    """Tensors made in any torch mode lie on the CPU, can be written and take gradients."""
    with MODES[mode]():
        made = MADE[kind]()
    assert not made.is_inference()
    made = made.view(torch.float32)
    assert made.device.type == "cpu"
    made.fill_(2.0).mul_(2.0)
    weight = torch.ones((), requires_grad=True)
    (made * weight).sum().backward()
    assert weight.grad.item() == made.numel() * 4.0


# memory that is used again


def test_small_tensors_are_plain_and_large_ones_are_aligned():
    """Large tensors come from the arena, aligned to 64 bytes; small ones do not."""
    assert allocate._arena.locate(allocate.empty((10,), torch.uint8)) is None
    for dtype in (torch.bool, torch.bfloat16, torch.complex128):
        tensor = allocate.empty((3, 5 << 20), dtype)
        assert allocate._arena.locate(tensor) is not None
        assert tensor.data_ptr() % 64 == 0
        assert (tuple(tensor.shape), tensor.dtype) == ((3, 5 << 20), dtype)


def test_pages_of_free_memory_have_a_bound():
    """Of private memory, too; the bytes read as zero from then on."""
    arena = InProcessArena(limit=3 << 20)
    held = [arena.empty((1 << 20,), torch.uint8).fill_(7) for _ in range(4)]
    addresses = {tensor.data_ptr() for tensor in held}
    while len(held) > 1:
        held.pop()
    assert arena._blocks.free_bytes == 3 << 20
    held.clear()
    assert arena._blocks.free_bytes == 0
    again = [arena.empty((1 << 20,), torch.uint8) for _ in range(4)]
    assert {tensor.data_ptr() for tensor in again} == addresses
    assert not any(tensor.any() for tensor in again)


def test_results_that_the_user_keeps_are_never_overwritten():
    """Results that are kept hold their values while later averages are computed."""

    def case() -> list[float]:
        kept = []
        for step in range(6):
            x = torch.full((1 << 19,), float(bf.rank() + 10 * step))
            kept.append(bf.neighbor_allreduce(x))
        return [float(t.min()) for t in kept if t.min() == t.max()]

    with bf.local_world(2) as world:
        assert world.run(case) == [[0.5 + 10 * step for step in range(6)]] * 2


def test_results_that_the_user_drops_are_used_again_without_the_garbage_collector():
    """Dropped results are freed by reference counts alone, so that few places are in use."""

    def case() -> set[int]:
        x = torch.ones(1 << 19)
        return {bf.neighbor_allreduce(x).data_ptr() for _ in range(40)}

    gc.disable()
    try:
        with bf.local_world(2) as world:
            places = set().union(*world.run(case))
    finally:
        gc.enable()
    assert len(places) <= 8, f"40 results of 2 ranks lay in {len(places)} places"
