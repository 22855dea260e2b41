"""Exception classes of the library, all derived from ``AsyncDDPError``.

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
    │   ├── PeerLeftError               a peer has ended, failed or was killed
    │   └── IsolatedError               the others of an elastic run go on without this rank
    ├── RankError                   a rank of local_world() raised; ``rank`` and ``__cause__`` tell
    └── EnvironmentProblem          something is missing or wrong on this machine

Invalid graphs raise :class:`.topology.TopologyError`, which the package ``topology`` defines.
"""

from __future__ import annotations

from asyncddp.printable_text import printable


class AsyncDDPError(Exception):
    """Base class of the library's exceptions; messages have control characters escaped."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class UsageError(AsyncDDPError):
    """Mistake of the caller, detected on this rank before anything was sent."""


class NotInitializedError(UsageError, RuntimeError):
    """Error: an operation was called before ``init()`` or after ``shutdown()``."""


class ArgumentError(UsageError, ValueError):
    """Error: an argument has an invalid value."""


class UnknownNameError(ArgumentError, KeyError):
    """Error: no plug-in of the requested kind has the given name."""

    __str__ = Exception.__str__


class DtypeError(UsageError, TypeError):
    """Error: a tensor has a dtype that the operation does not support."""


class PeerError(AsyncDDPError, RuntimeError):
    """Error between ranks: their calls contradict each other, or the other rank is gone.

    Attributes:
        origin: The rank where the error began, if known: the one that timed out, has left or found
            the contradiction; the others are told, and raise the same kind of error.
    """

    origin: int | None = None


class MismatchError(PeerError):
    """Error: ranks called different operations, dtypes, shapes or neighbours under one name."""


class DeadlockError(MismatchError):
    """Error: ranks wait for each other in a cycle, after calls in conflicting orders."""


class NonFiniteError(PeerError, ArithmeticError):
    """Error: a rank was about to compress NaN or infinities; nothing was sent or changed."""


class WaitTimeoutError(PeerError, TimeoutError):
    """Error: a peer did not respond by the deadline."""


class PeerLeftError(PeerError):
    """Error: a peer has ended its script, failed, or was killed while this rank needed it."""


class IsolatedError(PeerError):
    """Error: the other ranks of an elastic run go on without this one, or cannot be reached."""


class RankError(AsyncDDPError):
    """Error: a rank of ``local_world()`` raised an exception, which is the ``__cause__`` of this.

    Attributes:
        rank: The rank that failed first.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class EnvironmentProblem(AsyncDDPError, RuntimeError):  # noqa: N818 - not the fault of any call
    """Error: something on this machine is missing or unsuitable; the message says what to do."""
