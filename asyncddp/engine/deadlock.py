"""Deadlock detection by edge chasing: finds ranks that wait for each other in a cycle.

A rank that has waited for a while sends a probe to each peer that it waits for, along a wait-for
edge. A peer that is itself blocked in a verb, and has not submitted the awaited call, forwards the
probe along its own edges. A probe that returns to its first rank has found a cycle: blocked ranks
submit nothing, so that all edges still hold, and no rank of the cycle can ever proceed. A probe has
also found a cycle if it reaches a rank that waits for the same call of the same peer as its first
rank. Nothing in here communicates: the watchdog sends the probes.

Source: Chandy, Misra, Haas, "Distributed deadlock detection", ACM TOCS 1(2), 1983 (the AND model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncddp.engine.messages import DeadlockProbe, MatchKey, WaitForEdge

MAX_CYCLE = 256
"""Maximum number of ranks in a detected cycle; longer cycles end by the deadline."""
MAX_PROBED = 16
"""Maximum number of peers to which a rank sends or forwards a probe at a time."""


def choose_probed(
    missing: Sequence[tuple[int, MatchKey]], turn: int
) -> Sequence[tuple[int, MatchKey]]:
    """Choose the edges to probe: all if there are few, otherwise a different part in each turn.

    Otherwise, many ranks that wait for the same many ranks would send a message for each pair.
    """
    if len(missing) <= MAX_PROBED:
        return missing
    first = turn * MAX_PROBED % len(missing)
    return [*missing[first:], *missing[:first]][:MAX_PROBED]


def start_probes(
    rank: int, verb: str, missing: Sequence[tuple[int, MatchKey]], turn: int = 0
) -> list[tuple[int, DeadlockProbe]]:
    """Create the probes that a blocked rank sends first, each with its destination.

    ``turn`` counts the calls in this wait.
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
    """Return the probes that a blocked rank forwards, and the cycle if this probe has found one."""
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
    """Describe a cycle as text: each rank, its call, and the rank it waits for."""
    if len(cycle) == 1:
        return f"rank {cycle[0].rank} is in {cycle[0].verb} {cycle[0].key}"
    return "; ".join(
        f"rank {edge.rank} is in {edge.verb} and expects {edge.key} of rank {after.rank}"
        for edge, after in zip(cycle, (*cycle[1:], cycle[0]), strict=True)
    )
