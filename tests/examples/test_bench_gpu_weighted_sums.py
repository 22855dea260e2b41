"""The measurement of ways to mix on a device, on the host."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.support.processes import REPO


@pytest.fixture
def gpu_mixing(monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "scripts"))
    return importlib.import_module("benchmarks.gpu.weighted_sums")


def test_every_way_is_measured_for_every_size_dtype_and_number(gpu_mixing):
    """On the host all ways but Triton's have times and a number of copies."""
    dtypes = [torch.bfloat16, torch.float32]
    host = torch.device("cpu")
    found = list(gpu_mixing.measure_weighted_sums(host, [4096], dtypes, [2, 9], repeats=2))
    assert [figure.way for figure in found] == list(gpu_mixing.WAYS) * 4
    assert [figure.neighbours for figure in found[::3]] == [2, 9, 2, 9]
    for figure in found:
        if figure.way == "one pass, by Triton":
            assert figure.seconds is None, "Triton has no kernels for the host"
        else:
            assert figure.seconds > 0
            assert figure.enqueue > 0
            assert figure.copies > 0


def test_ways_that_differ_are_found(gpu_mixing, monkeypatch):
    """A way that gives another result raises AssertionError, which names the way."""

    def wrong(case):
        return lambda: case.out.copy_(case.own)

    monkeypatch.setitem(gpu_mixing.WAYS, "wrong", wrong)
    with pytest.raises(AssertionError, match="wrong"):
        list(
            gpu_mixing.measure_weighted_sums(
                torch.device("cpu"), [4096], [torch.float32], [2], repeats=1
            )
        )
