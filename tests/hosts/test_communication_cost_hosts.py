"""Averages between hosts take the seconds that ``topology.communication_cost`` predicts."""

from __future__ import annotations

import sys

import pytest

from tests.support.processes import REPO, warm_python

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

NBYTES, ROUNDS = 1 << 21, 3
ATTEMPTS = 3  # what else runs on the machine makes a call late, and never early
RATES = ("4 hosts", "4 hosts, 20 ms", "4 hosts, one slow link", "2 hosts of 2 ranks")


@pytest.fixture(params=range(4), ids=RATES)
def measurements(request, monkeypatch):
    """Measurements of all averages on some hosts, one after the other; skips where none can be."""
    monkeypatch.syspath_prepend(str(REPO / "scripts"))
    monkeypatch.setattr(sys, "executable", warm_python())
    from benchmarks.network.cost.__main__ import NETWORKS, measure
    from benchmarks.network.namespaces import refusal

    if problem := refusal():
        pytest.skip(problem)
    network = NETWORKS[request.param]
    return (measure(network, NBYTES, ROUNDS, lambda text: None) for _ in range(ATTEMPTS))


def test_plain_sockets_and_gloo_s_ring_take_what_is_predicted(measurements):
    """Within 15 %: one peer, two neighbours at once, and a ring allreduce; and ours is right.

    Held against those that add least of their own. A machine that is busy is given other chances;
    a wrong model fails all of them.
    """
    from benchmarks.network.cost.averages import ALLREDUCE, GLOO, OURS, SOCKETS, WITHIN

    judged = {("one-peer", SOCKETS), ("ring", SOCKETS), (ALLREDUCE, GLOO)}
    off: list[dict[tuple[str, str], float]] = []
    for found in measurements:
        assert found.missing == {}, "a result was wrong, or somebody could not run"
        ratios = found.ratios()
        assert {average for average, by in ratios if by == OURS} == {"one-peer", "ring", ALLREDUCE}
        off.append({key: ratios[key] for key in judged})
        if all(abs(ratio - 1) <= WITHIN for ratio in off[-1].values()):
            return
    pytest.fail(f"{found.place}: seconds ÷ prediction {off}")
