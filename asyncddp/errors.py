"""Exception classes of the library, in one tree below ``AsyncDDPError``.

::

    AsyncDDPError
    ├── UsageError                  a mistake of the caller, on this rank
    │   ├── NotInitializedError         an operation before init() or after shutdown()
    │   ├── ArgumentError               a wrong value (also a ValueError)
    │   │   └── UnknownNameError            no plug-in has that name (also a KeyError)
    │   └── DtypeError                  an unsupported dtype (also a TypeError)
    ├── PeerError                   calls of two ranks contradict each other, or one is gone
    │   ├── MismatchError               different operations, dtypes, shapes or neighbours
    │   │   └── DeadlockError               ranks wait for each other in a cycle
    │   ├── NonFiniteError              a rank has NaN or infinities (also an ArithmeticError)
    │   ├── WaitTimeoutError            a peer did not answer by the deadline (also a TimeoutError)
    │   └── PeerLeftError               a peer has ended, failed or was killed
    ├── RankError                   a rank of local_world() raised; ``rank`` and ``__cause__`` tell
    └── EnvironmentProblem          something is missing or wrong on this machine

Invalid graphs raise :class:`.topology.TopologyError`, which the package ``topology`` defines.
"""

from __future__ import annotations

from asyncddp.printable_text import printable


class AsyncDDPError(Exception):
    """Base class of all exceptions of the library; texts of other ranks cannot steer terminals."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class UsageError(AsyncDDPError):
    """A mistake of the caller, found on this rank before anything was sent."""


class NotInitializedError(UsageError, RuntimeError):
    """An operation was called before ``init()`` or after ``shutdown()``."""


class ArgumentError(UsageError, ValueError):
    """An argument has a wrong value."""


class UnknownNameError(ArgumentError, KeyError):
    """No plug-in of the kind asked for has the given name."""

    __str__ = Exception.__str__


class DtypeError(UsageError, TypeError):
    """A tensor has a dtype that the operation does not support."""


class PeerError(AsyncDDPError, RuntimeError):
    """Error between ranks: their calls contradict each other, or the other rank is gone.

    Attributes:
        origin: The rank where the error began, if known: the one that timed out, has left or found
            the contradiction; the others are told, and raise the same kind of error.
    """

    origin: int | None = None


class MismatchError(PeerError):
    """Two ranks called different operations, dtypes, shapes or neighbours under one name."""


class DeadlockError(MismatchError):
    """Ranks wait for each other in a cycle: operations were called in conflicting orders."""


class NonFiniteError(PeerError, ArithmeticError):
    """A rank would have encoded NaN or infinities; nothing was sent, and no state was changed."""


class WaitTimeoutError(PeerError, TimeoutError):
    """A peer did not answer by the deadline."""


class PeerLeftError(PeerError):
    """A peer has ended its script, failed, or was killed while this rank needed it."""


class RankError(AsyncDDPError):
    """A rank of ``local_world()`` raised an exception, which is the ``__cause__`` of this one.

    Attributes:
        rank: The rank that failed first.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class EnvironmentProblem(AsyncDDPError, RuntimeError):  # noqa: N818 - not the fault of any call
    """Error: something on this machine is missing or unsuitable; the message says what to do."""
