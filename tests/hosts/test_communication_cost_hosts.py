"""Averages between hosts take the seconds that ``topology.communication_cost`` predicts."""

from __future__ import annotations

import math
import sys

import pytest

from tests.support.processes import REPO, warm_python

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

ROUNDS = 2
ATTEMPTS = 3  # what else runs on the machine makes a call late, and never early
ONE_PEER, RING = ("one-peer", "plain sockets"), ("ring", "plain sockets")
ALLREDUCE = ("allreduce", "gloo")


@pytest.mark.parametrize(
    ("nbytes", "latency", "ranks", "judged"),
    [
        pytest.param(1 << 21, 0.0, 1, (ONE_PEER, RING, ALLREDUCE), id="4 hosts"),
        pytest.param(1 << 22, 0.02, 1, (RING,), id="4 hosts, 20 ms"),
        pytest.param(1 << 21, 0.0, 2, (RING,), id="2 hosts of 2 ranks"),
    ],
)
def test_plain_sockets_and_gloo_s_ring_take_what_is_predicted(
    monkeypatch, nbytes, latency, ranks, judged
):
    """Within 15 %: one peer, two neighbours at once, a ring allreduce; and ours is right.

    Held against those that add least of their own, by the fastest call of each: a machine that is
    busy is given other chances; a wrong model fails all of them. Over a long link tensors are
    larger, as TCP begins slowly.
    """
    monkeypatch.syspath_prepend(str(REPO / "scripts"))
    monkeypatch.setattr(sys, "executable", warm_python())
    from benchmarks.network.cost.__main__ import measure
    from benchmarks.network.cost.averages import OURS, WITHIN
    from benchmarks.network.host_runs import HostNetwork
    from benchmarks.network.namespaces import refusal

    if problem := refusal():
        pytest.skip(problem)
    network = HostNetwork(4 // ranks, "100mbit", latency, ranks_per_host=ranks)
    fastest = dict.fromkeys(judged, math.inf)
    for _ in range(ATTEMPTS):
        found = measure(network, nbytes, ROUNDS, lambda text: None)
        assert found.missing == {}, "a result was wrong, or somebody could not run"
        assert {row.table for row in found.rows if row.rival == OURS} == {
            "one-peer",
            "ring",
            "allreduce",
        }
        for row in found.rows:
            if (judge := (row.table, row.rival)) in fastest:
                ratio = min(row.seconds) / found.predicted(row)
                fastest[judge] = min(fastest[judge], ratio)
        if all(abs(ratio - 1) <= WITHIN for ratio in fastest.values()):
            return
    pytest.fail(f"{found.place}: seconds ÷ prediction {fastest}")
