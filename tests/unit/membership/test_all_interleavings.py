"""Three ranks: states reached by all orders of deliveries, deaths and clocks, up to a number."""

from __future__ import annotations

import pickle
import random
from collections import defaultdict

import pytest

from tests.unit.membership.cluster import PATIENCE, Cluster


def _steps(cluster: Cluster, victim: int | None, ticks: int):
    """Yield every action that is possible now, as a name, a function, and the ticks it takes."""
    for pair, messages in cluster.channels.items():
        if messages and pair[1] in cluster.active:
            yield lambda one, pair=pair: one.deliver(*pair), 0
            if pair[1] == victim:
                for sent in range(4):
                    yield lambda one, pair=pair, sent=sent: one.deliver(*pair, sent), 0
    if victim in cluster.living:
        yield lambda one: one.kill(victim), 0
    for rank in cluster.active:
        evidence = cluster.processes[rank].agreement._evidence
        for dead in cluster.ended - evidence.dead - {rank}:
            yield lambda one, rank=rank, dead=dead: one.certify(rank, dead), 0
        if ticks:
            yield lambda one, rank=rank: _wait(one, rank), 1


def _wait(cluster: Cluster, rank: int) -> None:
    """Let a patience pass for one rank."""
    for _ in range(2):
        agreement = cluster.processes[rank].agreement
        agreement._turns._last = cluster.now - PATIENCE / 2
        cluster.tick(rank)


def explore(cluster: Cluster, victim: int | None, ticks: int, limit: int) -> int:
    """Visit states that can be reached, in a random order up to a limit, and settle some."""
    cluster.channels = defaultdict(list, dict(cluster.channels))
    stack = [(pickle.dumps(cluster), ticks)]
    seen, chance = set(), random.Random(0)
    while stack and len(seen) < limit:
        place = chance.randrange(len(stack))
        stack[place], stack[-1] = stack[-1], stack[place]
        state, left = stack.pop()
        here = pickle.loads(state)
        steps = list(_steps(here, victim, left))
        for step, taken in steps:
            there = pickle.loads(state)
            step(there)
            reached = pickle.dumps(there)
            key = hash((reached, left - taken))
            if key not in seen:
                seen.add(key)
                stack.append((reached, left - taken))
        if not steps or len(seen) % 50 == 0:
            here.settle(8)
    return len(seen)


@pytest.mark.parametrize("victim", range(3))
def test_a_death_at_every_point(victim):
    """One rank dies at any moment, in the middle of its messages, too; the others learn of it."""
    cluster = Cluster(3)
    cluster.use(0, "a")
    cluster.use(1, "b")
    for other in set(range(3)) - {victim}:
        cluster.suspect(other, victim)
    assert explore(cluster, victim, ticks=1, limit=1500) > 200


@pytest.mark.parametrize(("accuser", "accused"), [(0, 1), (1, 0), (2, 0)])
def test_a_false_suspicion(accuser, accused):
    """One rank alone suspects another, wrongly; or two do, and the rank lives on."""
    cluster = Cluster(3)
    cluster.suspect(accuser, accused)
    explore(cluster, None, ticks=3, limit=500)
    assert not any(cluster.decided.values())
    cluster.suspect(3 - accuser - accused, accused)
    assert explore(cluster, None, ticks=1, limit=1000) > 200
