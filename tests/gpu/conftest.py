"""Tests of CUDA tensors. Without a GPU all of them are skipped, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.agreed import StagedWorld
from tests.gpu.groups import place_of
from tests.gpu.places import GPU


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Order the files of this folder by their groups; other tests stay where they are."""
    places = [k for k, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ours = sorted((items[k] for k in places), key=lambda item: place_of(item.path.name))
    for place, item in zip(places, ours, strict=True):
        items[place] = item


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
    return StagedWorld(request.param)
