"""What the stand-ins for GPUs and NCCL make quick."""

from __future__ import annotations

import pytest

from asyncddp.transport.cuda.nccl import nccl_collectives

WARM_UP_BYTES = (1 << 4, 1 << 18)


@pytest.fixture(autouse=True)
def _warms_up_quickly(monkeypatch):
    """NCCL's large collectives, which only connect ranks, are copies of the host here."""
    monkeypatch.setattr(nccl_collectives, "_WARM_UP_BYTES", WARM_UP_BYTES)
