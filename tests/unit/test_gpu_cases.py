"""The cases of ``tests/gpu``, on a GPU that is pretended: a mistake in one shows here.

So does a tensor that the library leaves on the wrong device, and what makes the host wait.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu import conformance
from tests.gpu.places import PretendedGPU
from tests.gpu.pretended import pretended_gpu
from tests.support import LoopbackWorld


@pytest.fixture
def place():
    with pretended_gpu() as streams:
        yield PretendedGPU(streams)


DTYPES = [torch.bool, torch.int16, torch.bfloat16, torch.complex64]
"""One of each kind: the others differ on a real device only."""

CASES = [
    pytest.param(min(case.ranks), case, id=str(case))
    for case in conformance.CASES
    if not {arg for arg in case.args if isinstance(arg, torch.dtype)} - set(DTYPES)
]


@pytest.mark.parametrize(("size", "case"), CASES)
def test_conformance(place, size, case):
    LoopbackWorld(size).run(conformance.perform, place, case, settings=case.settings)
