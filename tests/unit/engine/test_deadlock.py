"""The search for circles finds each circle and nothing else; probes are carried by hand."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncddp.config import Config
from asyncddp.engine import OperationSpec, ProgressEngine, deadlock, watchdog
from asyncddp.engine.deadlock import describe_cycle, forward_probe, start_probes
from asyncddp.engine.messages import ExchangeSignature, MatchKey, WaitForEdge
from asyncddp.errors import DeadlockError
from asyncddp.transport.loopback import LoopbackTransport


def key_of(rank):
    return MatchKey(f"of {rank}", 0)


def circles(waits, submitted=frozenset()):
    """Carry all probes until none is left.

    Args:
        waits: ``{rank: ranks that it waits for}``; ranks that are not in it are not blocked.
        submitted: Pairs (rank, peer): rank has submitted what peer waits for.
    """
    missing = {r: [(peer, key_of(r)) for peer in peers] for r, peers in waits.items()}
    under_way = [pair for r in waits for pair in start_probes(r, "verb", missing[r])]
    found, steps = set(), 0
    while under_way:
        steps += 1
        assert steps < 100_000, "probes never come to an end"
        rank, probe = under_way.pop()
        if rank not in waits:
            continue

        def has(key, rank=rank):
            return any(key == key_of(peer) and (rank, peer) in submitted for peer in waits)

        onward, circle = forward_probe(probe, rank, "verb", missing[rank], has)
        under_way += onward
        if circle is not None:
            found.add(tuple(link.rank for link in circle))
    return found


def test_a_circle_is_found_by_each_of_its_ranks():
    """Each rank of a cycle finds it, beginning with itself."""
    assert circles({0: [1], 1: [2], 2: [0]}) == {(0, 1, 2), (1, 2, 0), (2, 0, 1)}


def test_a_chain_that_ends_at_a_running_rank_is_none():
    """A chain of waiting ranks that ends at one that does not wait is no deadlock."""
    assert circles({0: [1], 1: [2]}) == set()


def test_ranks_that_lead_into_a_circle_are_not_in_it():
    """A rank that waits for a cycle from outside is not reported as part of it."""
    assert circles({0: [1], 1: [2], 2: [1]}) == {(1, 2), (2, 1)}


def test_what_was_submitted_is_on_its_way_and_no_edge():
    """Waiting for what the peer has submitted already makes no edge, and no cycle."""
    assert circles({0: [1], 1: [0]}, submitted={(1, 0)}) == set()


@given(st.integers(2, 5), st.data())
def test_circles_are_found_exactly_where_they_are(n, data):
    """Against a search over the whole graph."""
    ranks = st.integers(0, n - 1)
    waits = {
        r: sorted(data.draw(st.sets(ranks, max_size=3)) - {r})
        for r in range(n)
        if data.draw(st.booleans())
    }

    def reaches(start):
        seen, border = set(), {start}
        while border:
            border = {p for r in border for p in waits.get(r, ())} - seen
            seen |= border
        return start in seen

    assert {circle[0] for circle in circles(waits)} == {r for r in waits if reaches(r)}


def test_a_rank_that_waits_as_the_first_one_does_closes_a_circle():
    """Of ranks that wait alike one sends probes, and another one may be in the cycle."""
    barrier, other = MatchKey("<collective>", 0), MatchKey("w", 0)
    ((_, probe),) = start_probes(0, "barrier", [(2, barrier)])
    ((to, probe),), none = forward_probe(probe, 2, "average", [(1, other)], lambda key: False)
    assert (to, none) == (1, None)
    onward, circle = forward_probe(probe, 1, "barrier", [(2, barrier)], lambda key: False)
    assert onward == []
    assert circle == (WaitForEdge(1, "barrier", barrier), WaitForEdge(2, "average", other))


@pytest.mark.parametrize("many", [1, 16, 17, 40, 1000])
def test_each_of_many_peers_is_probed_in_its_turn(many):
    """Few are probed at a time; after n / 16 turns all have been, and all ranks begin elsewhere."""
    missing = [(peer, key_of(peer)) for peer in range(many)]
    turns = [
        [peer for peer, _ in start_probes(many, "verb", missing, turn)]
        for turn in range(-(-many // deadlock.MAX_PROBED) + 1)
    ]
    assert all(len(set(peers)) == min(many, deadlock.MAX_PROBED) for peers in turns)
    assert {peer for peers in turns for peer in peers} == set(range(many))


def test_a_circle_is_described_link_by_link():
    """The description names for each rank its verb, and what it expects of the next one."""
    circle = (
        WaitForEdge(0, "barrier", MatchKey("a", 0)),
        WaitForEdge(3, "allreduce", MatchKey("b", 1)),
    )
    assert describe_cycle(circle) == (
        "rank 0 is in barrier and expects 'a' (use 0) of rank 3; "
        "rank 3 is in allreduce and expects 'b' (use 1) of rank 0"
    )


def test_circles_beyond_the_longest_are_left_to_the_deadline(monkeypatch):
    """A cycle of more than ``MAX_CYCLE`` ranks is not found, one of ``MAX_CYCLE`` is."""
    monkeypatch.setattr(deadlock, "MAX_CYCLE", 5)
    for n in (5, 6):
        found = circles({r: [(r + 1) % n] for r in range(n)})
        assert len(found) == (n if n == 5 else 0)


# engines, driven by hand


def exchange(name, peers):
    """An operation that sends a number to all peers, and returns theirs."""
    form = ExchangeSignature("exchange", "int64", ())

    def steps(op):
        request = op.exchange(form, peers, peers)
        for peer in peers:
            op.send(request, peer, torch.tensor(op.rank))
        for peer in peers:
            yield request.receives[peer]
        return [request.receives[peer].take().item() for peer in peers]

    return OperationSpec("exchange", steps, name)


def test_who_waits_for_a_broken_cycle_closes_no_second_one(monkeypatch):
    """A rank goes on after a deadlock; another one, which is yet to hear of that, hears it from it.

    Rank 0 is so slow that it has told nobody that its own part has failed.
    """
    now = SimpleNamespace(monotonic=lambda: now.seconds, seconds=100.0)
    monkeypatch.setattr(watchdog, "time", now)
    engines = [ProgressEngine(one, Config()) for one in LoopbackTransport.group(3)]
    for engine in engines:
        engine.thread.stop()
        engine.thread = None

    waits = [ExitStack() for _ in engines]

    def begin(rank, name):
        handle = engines[rank].submit(exchange(name, [r for r in range(3) if r != rank]))
        waits[rank].close()
        waits[rank].enter_context(engines[rank].watchdog.blocked(handle._work, forever=True))
        return handle._work

    def turns(*ranks):
        now.seconds += 1.0
        for rank in ranks:
            engines[rank].progress()

    slow, lost, other = begin(0, "w"), begin(1, "mine"), begin(2, "w")
    turns(1, 0, 1)
    assert (slow.finished, lost.finished, other.finished) == (False, True, False)
    later = begin(1, "afterwards")
    turns(1, 2, 1, 2)
    assert not later.finished
    assert isinstance(other.error, DeadlockError)
    assert "rank 1 is in exchange and expects 'mine'" in str(other.error)
    begin(2, "afterwards")
    turns(0, 1)
    begin(0, "afterwards")
    turns(2, 0, 1, 2, 1)
    assert later.result == [0, 2]
