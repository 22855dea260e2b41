"""Every exception of the library, so that users can catch as narrowly or as widely as they like.

::

    AsyncDDPError
    ├── UsageError                  a mistake of the caller, on this rank
    │   ├── NotInitializedError         a verb before init() or after shutdown()
    │   ├── ArgumentError               a wrong value (also a ValueError)
    │   │   └── UnknownNameError            no plug-in has that name (also a KeyError)
    │   └── DtypeError                  a dtype that the verb cannot serve (also a TypeError)
    ├── PeerError                   this rank and another one do not fit together
    │   ├── MismatchError               other verb, name, dtype, shape or neighbours
    │   │   └── DeadlockError               ranks wait for each other in a circle
    │   ├── WaitTimeoutError            a peer did not come by the deadline (also a TimeoutError)
    │   └── PeerLeftError               a peer has ended, failed or was killed
    ├── RankError                   a rank of a local world raised; ``rank`` and ``__cause__`` tell
    └── EnvironmentProblem          something is missing or wrong on this machine

Graphs that cannot be raise :class:`topology.TopologyError`, which lives beside the library.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "AsyncDDPError",
    "DeadlockError",
    "DtypeError",
    "EnvironmentProblem",
    "MismatchError",
    "NotInitializedError",
    "PeerError",
    "PeerLeftError",
    "RankError",
    "UnknownNameError",
    "UsageError",
    "WaitTimeoutError",
]


class AsyncDDPError(Exception):
    """Anything that the library raises by itself."""


class UsageError(AsyncDDPError):
    """A mistake of the caller, found on this rank before anything was sent."""


class NotInitializedError(UsageError, RuntimeError):
    """A verb was called before ``init()`` or after ``shutdown()``."""


class ArgumentError(UsageError, ValueError):
    """An argument has a value that cannot be served."""


class UnknownNameError(ArgumentError, KeyError):
    """No plug-in of that kind has that name."""

    __str__ = Exception.__str__


class DtypeError(UsageError, TypeError):
    """A tensor has a dtype that the verb cannot serve."""


class PeerError(AsyncDDPError, RuntimeError):
    """This rank and another one do not fit together, or the other one is gone.

    Attributes:
        origin: The rank where it began, if known: the one that timed out, has left or found the
            contradiction; the others are told, and raise the same kind of error.
    """

    origin: int | None = None


class MismatchError(PeerError):
    """Two ranks meet in one name with different verbs, dtypes, shapes or neighbours."""


class DeadlockError(MismatchError):
    """Ranks wait for each other in a circle: verbs were called in orders that cannot meet."""


class WaitTimeoutError(PeerError, TimeoutError):
    """A peer did not answer by the deadline."""


class PeerLeftError(PeerError):
    """A peer has ended its script, failed, or was killed while this rank needed it."""


class RankError(AsyncDDPError):
    """A rank of a local world raised an exception, which is the ``__cause__`` of this one.

    Attributes:
        rank: The rank that failed first.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class EnvironmentProblem(AsyncDDPError, RuntimeError):  # noqa: N818 - not the fault of any call
    """Something on this machine is missing or does not fit; the message says what to do."""
