"""Ranks that wait for each other in a circle, found by chasing the edges. No I/O.

A rank that has waited for a while sends a probe along each edge "I wait until you submit this". A
rank that is itself blocked in a verb, and has not submitted what the probe asks for, passes it on
along its own edges. A probe that comes back to where it started has found a circle: since a
blocked rank submits nothing, every edge of it still holds, so nobody in it can ever go on.

Source: Chandy, Misra, Haas, "Distributed deadlock detection", ACM TOCS 1(2), 1983 (the AND model).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from asyncddp.engine.messages import Key, Probe, Waiting

__all__ = ["LONGEST", "describe", "extend", "started"]

LONGEST = 256
"""Ranks in a circle beyond which it is left to the deadline."""


def started(rank: int, verb: str, missing: Iterable[tuple[int, Key]]) -> list[tuple[int, Probe]]:
    """The probes with which a blocked rank starts."""
    return [(peer, Probe((Waiting(rank, verb, key),))) for peer, key in missing]


def extend(
    probe: Probe,
    rank: int,
    verb: str,
    missing: Iterable[tuple[int, Key]],
    submitted: Callable[[Key], bool],
) -> tuple[list[tuple[int, Probe]], tuple[Waiting, ...] | None]:
    """What a blocked rank does with a probe.

    Args:
        probe: What came.
        rank: This rank.
        verb: The verb in which this rank is blocked.
        missing: The peers and keys it waits for.
        submitted: Whether this rank has submitted a key.

    Returns:
        Probes to pass on, and the circle if this one has closed it.

    Example:
        >>> a, b = Key("a", 0), Key("b", 0)
        >>> sent = started(0, "neighbor_allreduce", [(1, a)])
        >>> on, _ = extend(sent[0][1], 1, "neighbor_allreduce", [(0, b)], lambda key: False)
        >>> _, circle = extend(on[0][1], 0, "neighbor_allreduce", [(1, a)], lambda key: False)
        >>> [link.rank for link in circle]
        [0, 1]
    """
    last, first = probe.chain[-1], probe.chain[0]
    if submitted(last.key):
        return [], None
    if first.rank == rank:
        still = any(key == first.key for _, key in missing)
        return [], probe.chain if still else None
    met = {link.rank for link in probe.chain[1:]}
    if rank in met or len(probe.chain) >= LONGEST:
        return [], None
    return [
        (peer, Probe((*probe.chain, Waiting(rank, verb, key))))
        for peer, key in missing
        if peer not in met
    ], None


def describe(circle: tuple[Waiting, ...]) -> str:
    """Say who waits for whom."""
    following = (*circle[1:], circle[0])
    links = [
        f"rank {link.rank} is in {link.verb} and expects {link.key} of rank {after.rank}"
        for link, after in zip(circle, following, strict=True)
    ]
    got = f"rank {circle[0].rank} is in {circle[0].verb} {circle[0].key}"
    return "; ".join(links) if len(circle) > 1 else got
