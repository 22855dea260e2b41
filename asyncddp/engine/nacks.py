"""Conversion of errors to negative acknowledgements (nacks) for peers, and of nacks to errors."""

from __future__ import annotations

from asyncddp.engine.messages import MatchKey, Nack
from asyncddp.errors import (
    DeadlockError,
    MismatchError,
    PeerError,
    PeerLeftError,
    WaitTimeoutError,
)

_SENDABLE_ERRORS: dict[str, type[PeerError]] = {
    kind.__name__: kind
    for kind in (DeadlockError, MismatchError, PeerError, PeerLeftError, WaitTimeoutError)
}
"""Errors that a :class:`Nack` carries: the peers of a rank that failed raise the same one."""


def nack_of(rank: int, key: MatchKey, error: PeerError, reason: str = "") -> Nack:
    """Build the nack that tells peers of an exchange that has failed on this rank.

    Args:
        rank: This rank.
        key: The key of the exchange.
        error: The error that it has failed with here.
        reason: Its cause, in the words that peers are told; else those of the error.
    """
    origin = rank if error.origin is None else error.origin
    kind = type(error).__name__
    kind = kind if kind in _SENDABLE_ERRORS else "PeerError"
    return Nack(key, reason or str(error), kind, origin)


def error_of_nack(rank: int, what: str, peer: int, nack: Nack) -> PeerError:
    """Build the error that a peer's nack means on this rank, of the kind that the peer met itself.

    Args:
        rank: This rank.
        what: What the peer has refused, for the message.
        peer: The peer.
        nack: Its nack.
    """
    kind = _SENDABLE_ERRORS.get(nack.kind, PeerError)
    did = "refused" if issubclass(kind, MismatchError) else "given up"
    error = kind(f"rank {rank}, {what}, {did} by rank {peer}: {nack.reason}")
    error.origin = nack.origin if nack.origin >= 0 else peer
    return error


def mismatch_found_by(rank: int, problem: str) -> MismatchError:
    """Build the error of a contradiction between messages that a rank has found."""
    error = MismatchError(problem)
    error.origin = rank
    return error
