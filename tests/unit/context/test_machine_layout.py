"""Which ranks share a machine, and which GPU each takes where settings simulate machines."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp.transport.loopback import LoopbackTransport
from tests.support import LoopbackWorld


def local_rank_and_gpu():
    return bf.local_rank(), bf.current().default_gpu


@pytest.mark.parametrize(
    ("hosts", "per_machine", "expected"),
    [
        ([0, 0, 0, 0], 2, [(0, 0), (1, 1), (0, 2), (1, 3)]),
        ([0, 0, 2, 2], 4, [(0, 0), (1, 1), (2, 0), (3, 1)]),
        ([0, 1, 0, 1], None, [(0, 0), (0, 0), (1, 1), (1, 1)]),
    ],
)
def test_gpus_go_by_the_real_host_and_local_ranks_by_simulated_machines(
    monkeypatch, hosts, per_machine, expected
):
    """Ranks of one host take GPUs of their own, whichever machines the settings simulate."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(LoopbackTransport, "machine_id", lambda self: hosts[self.rank])
    settings = {"ranks_per_machine": per_machine}
    assert LoopbackWorld(4).run(local_rank_and_gpu, settings=settings) == expected


@pytest.mark.parametrize(("count", "expected"), [(0, [None] * 3), (2, [0, 1, 0])])
def test_ranks_share_gpus_where_there_are_fewer(monkeypatch, count, expected):
    """The default GPU is the rank's number on its host modulo the visible ones, or None."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert LoopbackWorld(3).run(lambda: bf.current().default_gpu) == expected
