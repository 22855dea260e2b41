"""Tests of CUDA tensors. Without a GPU all of them are skipped, and say so."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.places import GPU
from tests.support import LoopbackWorld


@pytest.fixture(autouse=True)
def device():
    """The first GPU."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU: scripts/test gpu runs these where there is one")
    return torch.device("cuda", 0)


@pytest.fixture
def place():
    """Where ranks that are threads put their tensors."""
    return GPU()


@pytest.fixture(params=[2, 4], ids=["2-ranks", "4-ranks"])
def ranks(request):
    """Ranks that are threads and share the first GPU."""
    return LoopbackWorld(request.param)
