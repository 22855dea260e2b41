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


def deliver(cluster: Cluster, draw, rank: int, sent: int | None) -> None:
    busy = [pair for pair, messages in cluster.channels.items() if messages]
    busy = sorted(pair for pair in busy if pair[1] in cluster.living)
    if busy:
        cluster.deliver(*draw(st.sampled_from(busy)), sent)


def burst(cluster: Cluster, draw, rank: int, sent: int | None) -> None:
    for pair, messages in sorted(cluster.channels.items()):
        while messages and pair[1] in cluster.living:
            cluster.deliver(*pair)


def tick(cluster: Cluster, draw, rank: int, sent: int | None) -> None:
    cluster.now += draw(st.sampled_from((0.0, PATIENCE, 3 * PATIENCE)))
    cluster.tick(rank, sent)


def use(cluster: Cluster, draw, rank: int, sent: int | None) -> None:
    cluster.use(rank, draw(st.sampled_from("ab")))


def certify(cluster: Cluster, draw, rank: int, sent: int | None) -> None:
    if cluster.ended:
        cluster.certify(rank, draw(st.sampled_from(sorted(cluster.ended))))


def suspect(cluster: Cluster, draw, rank: int, sent: int | None) -> None:
    cluster.suspect(rank, draw(st.sampled_from(sorted(cluster.processes))), sent)


def suspect_by_all(cluster: Cluster, draw, rank: int, sent: int | None) -> None:
    for other in set(cluster.active) - {rank}:
        cluster.suspect(other, rank)


def withdraw(cluster: Cluster, draw, rank: int, sent: int | None) -> None:
    cluster.withdraw(rank, draw(st.sampled_from(sorted(cluster.processes))))


def cut(cluster: Cluster, draw, rank: int, sent: int | None) -> None:
    cluster.cuts.add((rank, draw(st.sampled_from(sorted(cluster.processes)))))


def join(cluster: Cluster, draw, rank: int, sent: int | None) -> None:
    if cluster.processes[rank].agreement.joined:
        places = [*sorted(cluster.ended), len(cluster.processes)]
        cluster.join(rank, draw(st.sampled_from(places)))


def leave(cluster: Cluster, draw, rank: int, sent: int | None) -> None:
    cluster.leave(rank, sent)


ACTIONS = (
    *[deliver] * 12, *[tick] * 3, *[certify] * 2, *[burst] * 2,
    use, suspect, suspect_by_all, withdraw, cut, join, leave,
)  # fmt: skip


def step(cluster: Cluster, draw) -> None:
    """Let a random rank do something, and sometimes die before it has sent all that follows."""
    if cluster.active:
        rank = draw(st.sampled_from(cluster.active))
        dies = len(cluster.living) > 1 and not draw(st.integers(0, 9))
        draw(st.sampled_from(ACTIONS))(
            cluster, draw, rank, draw(st.integers(0, 6)) if dies else None
        )


@hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(st.data())
def test_random_histories(data):
    """Whatever happened, the ranks that are not isolated become one view once messages flow."""
    cluster = Cluster(data.draw(st.integers(2, 6)))
    for _ in range(data.draw(st.integers(1, 120))):
        step(cluster, data.draw)
    for observer in cluster.active:
        for rank in cluster.processes:
            cluster.withdraw(observer, rank)
    cluster.settle()
