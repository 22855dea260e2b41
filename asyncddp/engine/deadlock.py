"""Deadlock detection: finds ranks that wait for each other in a cycle, by edge chasing.

A rank that has waited for a while sends a probe along each edge "I wait until you submit this". A
rank that is itself blocked in a verb, and has not submitted what the probe asks for, passes it on
along its own edges. A probe that comes back to where it started has found a cycle: since a
blocked rank submits nothing, every edge of it still holds, so no rank in it can ever go on. So has
one that comes to a rank which waits for the same call of the same peer as the first one did.
Nothing in here communicates: the watchdog sends the probes.

Source: Chandy, Misra, Haas, "Distributed deadlock detection", ACM TOCS 1(2), 1983 (the AND model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncddp.engine.messages import DeadlockProbe, MatchKey, WaitForEdge

MAX_CYCLE = 256
"""Ranks in a cycle beyond which it is left to the deadline."""
MAX_PROBED = 16
"""Peers that a rank probes at a time, and to which it passes a probe on."""


def choose_probed(
    missing: Sequence[tuple[int, MatchKey]], turn: int
) -> Sequence[tuple[int, MatchKey]]:
    """Choose the edges along which to send: all of few, and of many some others each turn.

    Many ranks that wait for the same many would otherwise send a message for each pair of them.
    """
    if len(missing) <= MAX_PROBED:
        return missing
    first = turn * MAX_PROBED % len(missing)
    return [*missing[first:], *missing[:first]][:MAX_PROBED]


def start_probes(
    rank: int, verb: str, missing: Sequence[tuple[int, MatchKey]], turn: int = 0
) -> list[tuple[int, DeadlockProbe]]:
    """Create the probes with which a blocked rank starts, and the peer to send each to.

    ``turn`` is how often it has done so in this wait.
    """
    probed = choose_probed(missing, rank + turn)
    return [(peer, DeadlockProbe((WaitForEdge(rank, verb, key),))) for peer, key in probed]


def forward_probe(
    probe: DeadlockProbe,
    rank: int,
    verb: str,
    missing: Sequence[tuple[int, MatchKey]],
    submitted: Callable[[MatchKey], bool],
) -> tuple[list[tuple[int, DeadlockProbe]], tuple[WaitForEdge, ...] | None]:
    """Return the probes that a blocked rank passes on, and the cycle if this one has closed one."""
    last, first = probe.chain[-1], probe.chain[0]
    if submitted(last.key):
        return [], None
    if first.rank == rank:
        still = any(key == first.key for _, key in missing)
        return [], probe.chain if still else None
    visited = {edge.rank for edge in probe.chain[1:]}
    if rank in visited or len(probe.chain) >= MAX_CYCLE:
        return [], None
    if len(probe.chain) > 1 and (probe.chain[1].rank, first.key) in missing:
        return [], (WaitForEdge(rank, verb, first.key), *probe.chain[1:])
    onward = choose_probed([edge for edge in missing if edge[0] not in visited], first.rank)
    return [
        (peer, DeadlockProbe((*probe.chain, WaitForEdge(rank, verb, key)))) for peer, key in onward
    ], None


def describe_cycle(cycle: tuple[WaitForEdge, ...]) -> str:
    """Describe a cycle in words: which rank waits for which."""
    if len(cycle) == 1:
        return f"rank {cycle[0].rank} is in {cycle[0].verb} {cycle[0].key}"
    return "; ".join(
        f"rank {edge.rank} is in {edge.verb} and expects {edge.key} of rank {after.rank}"
        for edge, after in zip(cycle, (*cycle[1:], cycle[0]), strict=True)
    )
