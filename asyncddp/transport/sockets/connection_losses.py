"""Lost connections: the process at the other end may have ended, or be out of reach.

A machine's system closes the connections of a process that ends, and refuses new ones. Between
machines the other end may also have closed a connection after a silence, and live on.
"""

from __future__ import annotations

import socket

from asyncddp.transport.sockets.world_records import RankRecord

_ENDED = "its process has ended without shutdown()"
_ENDS = EOFError, ConnectionResetError, BrokenPipeError, ConnectionRefusedError
_ANSWER_SECONDS = 1.0  # in which a machine accepts or refuses a connection


class ConnectionLosses:
    """Record of lost connections to ranks that are not known to have ended."""

    def __init__(self) -> None:
        self._closed: dict[int, RankRecord] = {}  # by the other end, which may live
        self._silent: set[int] = set()

    def add(
        self, peer: int, mine: RankRecord, theirs: RankRecord, error: Exception, told: str | None
    ) -> str:
        """Record that the connection to a rank was lost by an error; return the reason to tell.

        ``told`` is what another rank has said of it, which has seen it fail first.
        """
        if not isinstance(error, _ENDS):
            self._silent.add(peer)
        elif mine.machine != theirs.machine and not isinstance(error, ConnectionRefusedError):
            self._closed[peer] = theirs
        if isinstance(error, ValueError):
            return f"what it sent cannot be read: {error}"
        if isinstance(error, _ENDS) and not isinstance(error, ConnectionRefusedError):
            return _ENDED
        return told or f"it cannot be reached: {error}"

    def has_ended(self, peer: int) -> bool:
        """Return whether a rank whose connection was lost has ended; its machine is asked once."""
        theirs = self._closed.pop(peer, None)
        if theirs is not None and not _refuses(theirs):
            self._silent.add(peer)
        return peer not in self._silent

    def forget(self, peer: int) -> None:
        """Forget what was lost of a rank, whose place another process takes."""
        self._closed.pop(peer, None)
        self._silent.discard(peer)


def _refuses(record: RankRecord) -> bool:
    """Return whether a rank's machine refuses connections to it, since it has ended."""
    try:
        socket.create_connection((record.host, record.port), _ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
