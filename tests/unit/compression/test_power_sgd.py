"""PowerSGD: exact at low rank, better with a warm start, never lost."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp.compression.power_sgd import PowerSGD
from tests.unit.compression.codec import encoded, normal, received

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def error(q, x, **options):
    """Relative error of one approximation."""
    return float((received(q, x, **options) - x).norm() / x.norm())


def low_rank(height, width, rank, dtype=torch.float32, seed=0):
    """A matrix of that rank as a chunk."""
    left = normal(height, rank, dtype=torch.float64, seed=seed)
    right = normal(rank, width, dtype=torch.float64, seed=seed + 1)
    return (left @ right).to(dtype).reshape(1, -1)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_a_matrix_of_the_rank_is_exact(rank, dtype, most):
    """Up to rounding, from any start."""
    x = low_rank(32, 32, rank, dtype)
    for seed in range(3):
        assert error(PowerSGD(rank=rank), x, seed=seed) < most
    assert error(PowerSGD(rank=4), low_rank(32, 32, 1, dtype)) < most


@pytest.mark.parametrize("numel", [1, 2, 3, 5, 6, 12, 13, 35, 36, 37, 1000])
def test_any_number_of_elements_makes_a_matrix(numel):
    """Filled by rows, of which the last may be short; a side is at most about twice the other."""
    x = normal(3, numel, dtype=torch.float64)
    q = PowerSGD(rank=1000)
    torch.testing.assert_close(received(q, x), x)
    height, width, rank = q._matrix(numel)
    assert rank == min(height, width)
    assert width.bit_count() == 1
    assert max(height, width) <= 2 * min(height, width) + 1
    assert (height - 1) * width < numel <= height * width


def test_a_layer_s_gradient_of_low_rank_stays_one_in_a_bucket():
    """Behind its bias, and cut among 4 ranks anywhere: at most three times its rank, and one."""
    weight = low_rank(256, 512, 2, torch.float64)
    bucket = torch.cat((torch.zeros(1, 256, dtype=torch.float64), weight), dim=1)
    parts = torch.nn.functional.pad(bucket, (0, -bucket.numel() % 4)).view(4, -1)
    assert error(PowerSGD(rank=7), parts) < 1e-12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_size_is_that_of_both_factors(dtype):
    """(m + n) r numbers of 4 bytes, 8 for float64, up to a multiple of 8."""
    wide = 8 if dtype is torch.float64 else 4
    assert PowerSGD(rank=2).encoded_size(10_000, dtype) == 2 * (128 + 79) * wide
    assert PowerSGD(rank=1).encoded_size(10, dtype) == 8 * -(-7 * wide // 8)
    assert PowerSGD(rank=9).encoded_size(4, dtype) == 2 * 4 * wide


def test_p_is_orthonormal_and_the_decoded_a_projection():
    """M̂ = P Pᵀ M: what is lost is orthogonal to what is kept."""
    x = normal(1, 960, dtype=torch.float64)
    rows = encoded(PowerSGD(rank=3), x)
    p = rows.view(torch.float64)[0, :90].view(3, 30)
    torch.testing.assert_close(p @ p.T, torch.eye(3, dtype=torch.float64))
    back = received(PowerSGD(rank=3), x)
    assert abs(float((x - back).flatten() @ back.flatten())) < 1e-9


def test_a_warm_start_gets_better():
    """Sent again and again, a matrix is approximated nearly as well as by its best of the rank."""
    x = normal(1, 4096, dtype=torch.float64)
    x += 2 * low_rank(64, 64, 3, torch.float64, seed=5)
    q = PowerSGD(rank=3)
    state = q.new_state(x)
    errors = [error(q, x, seed=use, state=state) for use in range(12)]
    best = float(torch.linalg.svdvals(x.view(64, 64))[3:].norm() / x.norm())
    assert errors[0] > errors[1] > errors[-1]
    assert errors[-1] < best * 1.001
    assert error(q, x, seed=11) > errors[1]


def test_a_warm_start_recovers():
    """From zeros, from what is not finite, and where tensors are far from 1."""
    q = PowerSGD(rank=2)
    x = low_rank(16, 16, 2)
    state = q.new_state(x)
    for before in (
        torch.zeros_like(x),
        torch.full_like(x, torch.nan),
        x * torch.inf,
        x * 1e-20,
        x * 1e15,
    ):
        received(q, before, state=state)
        received(q, x, state=state)
        assert error(q, x, state=state) < 1e-4


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "4"])
def test_a_wrong_rank_is_named(wrong):
    """The message names the argument, what was expected and what came."""
    with pytest.raises(
        bf.ArgumentError, match=r"^power_sgd: argument rank: expected a positive int"
    ):
        PowerSGD(rank=wrong)
