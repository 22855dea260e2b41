"""Views are agreed on whoever dies, pauses, joins or is suspected, in every order of messages."""

from __future__ import annotations

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.unit.membership.cluster import PATIENCE, Cluster


@pytest.mark.parametrize(
    ("n", "dead"),
    [
        (n, dead)
        for n in range(2, 7)
        for size in range(1, n)
        for dead in itertools.combinations(range(n), size)
    ],
)
def test_survivors_of_certified_deaths_go_on_without_them(n, dead):
    """One of n goes on when all others are proven dead; nobody is isolated."""
    cluster = Cluster(n)
    for rank in range(n):
        for _ in range(rank):
            cluster.use(rank, "gradient")
    for rank in dead:
        cluster.kill(rank)
    survivors = cluster.living
    for rank in dead:
        cluster.certify(survivors[-1], rank)
    cluster.flow()
    cluster.now += PATIENCE
    for rank in survivors:
        cluster.tick(rank)
    cluster.flow()
    cluster.settle(2)
    assert cluster.active == survivors
    view = cluster.processes[survivors[0]].agreement.view
    assert view.members == tuple(survivors)
    assert view.starts.get("gradient", 0) == survivors[-1]


ACTIONS = ("deliver",) * 12 + (
    "tick", "tick", "use", "kill", "kill_in_tick", "kill_in_delivery", "certify", "certify",
    "suspect", "suspect", "gang", "withdraw", "cut", "join", "burst", "burst",
)  # fmt: skip


def step(cluster: Cluster, data) -> None:
    """Do one random thing."""
    draw = data.draw
    kind = draw(st.sampled_from(ACTIONS))
    active = cluster.active
    busy = sorted(
        pair
        for pair, messages in cluster.channels.items()
        if messages and pair[1] not in cluster.ended
    )
    if not active:
        return
    rank = draw(st.sampled_from(active))
    prefix = draw(st.integers(0, 6))
    alone = len(cluster.living) == 1
    if kind in ("deliver", "kill_in_delivery") and busy:
        dies = kind == "kill_in_delivery" and not alone
        cluster.deliver(*draw(st.sampled_from(busy)), prefix if dies else None)
    elif kind == "burst":
        for pair in busy:
            while cluster.channels[pair]:
                cluster.deliver(*pair)
    elif kind == "tick":
        cluster.now += draw(st.sampled_from((0.0, PATIENCE, 3 * PATIENCE)))
        cluster.tick(rank)
    elif kind == "use":
        cluster.use(rank, draw(st.sampled_from("ab")))
    elif kind == "kill" and not alone:
        cluster.kill(rank)
    elif kind == "kill_in_tick" and not alone:
        cluster.now += PATIENCE
        cluster.tick(rank, prefix)
    elif kind == "certify" and cluster.ended:
        cluster.certify(rank, draw(st.sampled_from(sorted(cluster.ended))))
    elif kind == "suspect":
        cluster.suspect(rank, draw(st.sampled_from(sorted(cluster.processes))))
    elif kind == "gang":
        suspect = draw(st.sampled_from(active))
        for one in active:
            if one != suspect:
                cluster.suspect(one, suspect)
    elif kind == "withdraw":
        cluster.withdraw(rank, draw(st.sampled_from(sorted(cluster.processes))))
    elif kind == "cut":
        cluster.cuts.add((rank, draw(st.sampled_from(sorted(cluster.processes)))))
    elif kind == "join" and cluster.processes[rank].agreement.joined:
        places = [*sorted(cluster.ended), len(cluster.processes)]
        cluster.join(rank, draw(st.sampled_from(places)))


@hypothesis.settings(max_examples=150, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(st.data())
def test_random_histories(data):
    cluster = Cluster(data.draw(st.integers(2, 6)))
    for _ in range(data.draw(st.integers(1, 120))):
        step(cluster, data)
    for observer in cluster.active:
        for rank in cluster.processes:
            cluster.withdraw(observer, rank)
    cluster.settle()
