"""Authentication of ranks: proof that another process is a rank of this run.

On one machine the system tells whose process the other end of a Unix socket is. Between machines,
and in the store, where anybody may write who reaches it, ranks show codes (HMAC) that only those
can make who know ``ASYNCDDP_SECRET``. Without a secret whoever reaches the store is believed.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from asyncddp.errors import EnvironmentProblem
from asyncddp.serialization import pack

T = TypeVar("T")
_CREDENTIALS = struct.Struct("3i")  # process, user and group
_CODE_BYTES = 32
_HELLO_TIMEOUT = 10.0  # seconds in which who connects has to say which rank it is
_MAX_UNKNOWN = 64  # connections that have not said so


def is_same_user(connection: socket.socket) -> bool:
    """Tell whether the other end of a Unix socket is a process of the same user."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(told)[1] == os.geteuid())


def code_of(secret: bytes, *words: str | int | bytes) -> bytes:
    """Return an authentication code (HMAC) of some words, keyed by the secret."""
    return hmac.digest(secret, pack(words), "sha256")


def overdue(unknown: Mapping[T, float]) -> list[T]:
    """List connections that have stayed silent for too long, and the oldest beyond a limit.

    The mapping gives the time at which each connection was made, oldest first.
    """
    late, surplus = time.monotonic() - _HELLO_TIMEOUT, len(unknown) - _MAX_UNKNOWN
    every = enumerate(unknown.items())
    return [one for place, (one, since) in every if since < late or place < surplus]


class StoreAuthenticator(NamedTuple):
    """Authentication of values that ranks write to torch's store, which others may access too.

    Attributes:
        secret: Secret of the run; empty if it has none.
        place: Address of the store, for messages.
    """

    secret: bytes
    place: str

    def close(self, key: str, data: bytes) -> bytes:
        """Prepend to a value an authentication code of its key and content."""
        return code_of(self.secret, key, data) + data

    def open(self, key: str, sealed: bytes) -> bytes:
        """Verify and return a value; raise EnvironmentProblem if the secret does not match."""
        code, data = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
        if not hmac.compare_digest(code, code_of(self.secret, key, data)):
            raise self.broken(key)
        return data

    def broken(self, key: str) -> EnvironmentProblem:
        """Make the error for a value that was not written by a rank of this run."""
        return EnvironmentProblem(
            f"init(): what the store at {self.place} has as {key} was written without the "
            "ASYNCDDP_SECRET of this rank: set it alike for all ranks; if it is, another process "
            "has written there"
        )
