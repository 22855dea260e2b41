"""The kernel that mixes, on a GPU: beside float64, at odd places, and as part of a verb."""

from __future__ import annotations

import logging

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.kernels import device_weighted_sum
from asyncddp.kernels.weight_row import WeightRow
from tests.gpu.agreed import StagedWorld

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def kernel(device):
    """The kernel's module; a GPU without Triton is worth knowing of."""
    pytest.importorskip("triton", reason="torch was installed here without Triton")
    from asyncddp.kernels import triton_sum

    with torch.cuda.device(device):
        yield triton_sum


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def drawn(count, size, dtype, device):
    generator = torch.Generator(device).manual_seed(size)
    return [torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(count)]


def assert_rounded(out, tensors, weights, divisor=1):
    """Half a unit of its dtype from the sum in float64, and rounding of sums in the wide one."""
    parts = [weight * tensor.double() for weight, tensor in zip(weights, tensors, strict=True)]
    expected = torch.stack(parts).sum(0) / divisor
    size = torch.stack(parts).abs().sum(0) / divisor
    unit = torch.finfo(out.dtype)
    allowed = 0.5 * unit.eps * expected.abs() + unit.smallest_normal * unit.eps
    allowed += torch.finfo(wide(out.dtype)).eps * (len(tensors) + 2) * size
    assert ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("others", [0, 1, 2, 3, 8, 9, 17])
def test_the_sum_is_that_of_float64_rounded(kernel, device, dtype, others):
    """The error is at most half a unit of the dtype and rounding of sums, up to 18 tensors."""
    for size in (1, 2047, 2048, 1_000_003):
        tensors = drawn(1 + others, size, dtype, device)
        weights = [(-1) ** k / (k + 3) for k in range(1 + others)]
        out = torch.full_like(tensors[0], float("nan"))
        kernel.weighted_sum(tensors[0], tensors[1:], weights, out, dtype=wide(dtype))
        assert_rounded(out, tensors, weights)
        kernel.weighted_sum(tensors[0], tensors[1:], weights, tensors[0], dtype=wide(dtype))
        assert torch.equal(tensors[0], out), "in place"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_means_and_views_at_odd_places(kernel, device, dtype):
    """A mean of unaligned views is right, and nothing beside the output view is written."""
    bases = drawn(5, 70_007, dtype, device)
    tensors = [base[1 + k : 70_001 + k] for k, base in enumerate(bases)]
    before = bases[4].clone()
    kernel.weighted_sum(
        tensors[0], tensors[1:4], [1.0] * 4, tensors[4], divisor=4, dtype=wide(dtype)
    )
    assert_rounded(tensors[4], tensors[:4], [1.0] * 4, 4)
    assert torch.equal(bases[4][:5], before[:5])
    assert torch.equal(bases[4][70_005:], before[70_005:])


def test_weights_reach_the_kernel_with_all_their_bits(kernel, device):
    """Weights of a float64 sum are not rounded to float32 on their way."""
    x = torch.ones(3, dtype=torch.float64, device=device)
    for first, second in [(1 / 3, 1e-17), (0.1 + 2**-54, 0.7), (0.0, 1.0)]:
        out = torch.empty_like(x)
        kernel.weighted_sum(x, [x], [first, second], out, dtype=torch.float64)
        assert out.tolist() == [first + second] * 3


def test_more_elements_than_32_bits_count(kernel, device):
    """A sum of more than 2**31 elements is right in all of them."""
    if torch.cuda.mem_get_info(device)[0] < 16 << 30:
        pytest.skip("takes 13 GB of the GPU's memory")
    count = (1 << 31) + 5
    x, y = (torch.full((count,), v, dtype=torch.float16, device=device) for v in (1.0, 2.0))
    out = torch.empty_like(x)
    kernel.weighted_sum(x, [y], [0.5, 0.25], out)
    assert float(out[-1]) == 1.0
    assert float(out.amin()) == float(out.amax()) == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_gives_what_torch_gives(kernel, device, dtype, caplog):
    """By the verb's own arithmetic, which says so where the kernel cannot be had."""
    caplog.set_level(logging.WARNING, logger="asyncddp")
    for mixing in (WeightRow(0.25, {3: 0.5}, {}), WeightRow(1 / 3, {1: 1 / 3, 4: 1 / 3}, {})):
        own, *others = drawn(1 + len(mixing.sources), 100_003, dtype, device)
        ours, torchs = torch.empty_like(own), torch.empty_like(own)
        device_weighted_sum.weighted_sum_on_device(mixing, wide(dtype), own, others, ours)
        mixing.weighted_sum_in(wide(dtype), own, others, torchs)
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(ours, torchs, rtol=unit, atol=4 * torch.finfo(wide(dtype)).eps)
    assert caplog.records == [], "the kernel was taken"


def test_threads_that_first_need_it_at_once(kernel, device):
    """Four threads whose first averages are simultaneous all get the right one."""

    def averaged():
        bf.set_topology(topology.complete(4))
        x = torch.full((50_001,), float(bf.rank()), device=device)
        return bf.neighbor_allreduce(x).unique().tolist()

    assert StagedWorld(4).run(averaged) == [[1.5]] * 4
