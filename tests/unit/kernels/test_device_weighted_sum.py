"""Averages on a device go on with torch where the kernel cannot serve, and say so once."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch

import asyncddp.kernels
from asyncddp.kernels import device_weighted_sum
from asyncddp.kernels.device_weighted_sum import TritonWeightedSum, weighted_sum_on_device
from asyncddp.kernels.weight_row import WeightRow

NAME = "asyncddp.kernels.triton_sum"
ROW = WeightRow(0.5, {1: 0.25, 2: 0.125}, {})


@pytest.fixture
def fused(monkeypatch, caplog):
    """Tensors of the host are given to the kernel."""
    caplog.set_level(logging.WARNING, logger="asyncddp")
    monkeypatch.setattr(device_weighted_sum, "_triton_sum", TritonWeightedSum("cpu"))


def averaged(dtype=torch.bfloat16):
    x, y, z = (torch.full((4,), value, dtype=dtype) for value in (2.0, 4.0, 8.0))
    weighted_sum_on_device(ROW, torch.float32, x, [y, z], x)
    return x.tolist()


@pytest.fixture
def put(monkeypatch):
    """Puts a function in place of the kernel; None in place of Triton."""
    monkeypatch.delattr(asyncddp.kernels, "triton_sum", raising=False)
    monkeypatch.delitem(sys.modules, NAME, raising=False)

    def put(mix):
        if mix is None:
            monkeypatch.setitem(sys.modules, "triton", None)
            return
        module = ModuleType(NAME)
        module.weighted_sum, module.FAILURES = mix, (RuntimeError,)
        monkeypatch.setitem(sys.modules, NAME, module)

    return put


def test_where_triton_is_missing_torch_goes_on(fused, put, caplog):
    """Without Triton torch forms the averages, and one warning for all calls says why."""
    put(None)
    assert averaged() == [3.0] * 4
    assert averaged() == [3.0] * 4
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "averages on the GPU take one pass over memory for each neighbour, by torch, and not one "
        "for all, by Triton: "
    )
    assert "triton" in record.getMessage().rpartition(": ")[2]


def test_a_kernel_that_does_not_compile_is_asked_once(fused, put, caplog):
    """A kernel that fails is never launched again; torch takes over, with one warning."""
    calls = []

    def mix(*args, **more):
        calls.append(1)
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC.")

    put(mix)
    assert averaged() == [3.0] * 4
    assert averaged() == [3.0] * 4
    assert calls == [1]
    (record,) = caplog.records
    assert record.getMessage().endswith("RuntimeError: Failed to find C compiler.")


def test_what_is_no_failure_of_triton_s_is_raised(fused, put):
    """A mistake of this library's own is not hidden by a slower way."""

    def mix(*args, **more):
        raise ZeroDivisionError

    put(mix)
    with pytest.raises(ZeroDivisionError):
        averaged()


def test_the_kernel_gets_the_weights_or_a_sum_and_a_divisor(fused, put):
    """The kernel gets a row's weights; of a uniform one powers of two, and what divides the sum."""
    given = []

    def mix(own, others, weights, out, *, divisor, dtype):
        given.append((len(others), weights, divisor, dtype))

    put(mix)
    averaged()
    x = torch.ones(3, dtype=torch.float64)
    row = WeightRow(1 / 3, {4: 1 / 3, 2: 1 / 3}, {})
    weighted_sum_on_device(row, torch.float64, x, [x, x], torch.empty(3, dtype=torch.float64))
    assert given == [
        (2, [0.5, 0.25, 0.125], 1, torch.float32),
        (2, [0.25, 0.25, 0.25], 0.75, torch.float64),
    ]


def test_tensors_elsewhere_and_strided_ones_are_left_to_torch(fused, put, monkeypatch):
    """The kernel sees neither strided tensors nor those of another device type."""

    def mix(*args, **more):
        raise AssertionError("the kernel was asked")

    put(mix)
    base = torch.full((4, 2), 2.0)
    out = torch.empty(4)
    weighted_sum_on_device(ROW, torch.float32, base[:, 0], [base[:, 1], base[:, 1]], out)
    assert out.tolist() == [1.75] * 4
    monkeypatch.setattr(device_weighted_sum, "_triton_sum", TritonWeightedSum("cuda"))
    assert averaged() == [3.0] * 4
