"""Tests of CUDA tensors. Without a GPU all of them are skipped, and say so."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def device():
    """The first GPU."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU: scripts/test gpu runs these where there is one")
    return torch.device("cuda", 0)
