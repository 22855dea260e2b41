"""Start of a transport: the deadline of ``init()``, and settings that all ranks must share."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

import asyncddp
from asyncddp.agreement import compare
from asyncddp.config import Config
from asyncddp.deadline import Deadline
from asyncddp.environments.launchers import announced, run_name
from asyncddp.errors import WaitTimeoutError
from asyncddp.rank_list_text import list_ranks

_MPI_STARTUP_SECONDS = 60.0  # seconds that MPI itself may take once all processes have come
_NONE_MISSING = "all ranks have called it, but MPI has not started"
_arrival_sockets: dict[str, socket.socket] = {}
"""Names that this process holds, also after its deadline has passed: it did call ``init()``."""


class InitArrivalTracker:
    """Tracker of local ranks that have called ``init()``, usable before MPI starts.

    While the context is open, a rank holds a name among the abstract Unix sockets of the machine,
    which the system frees when the process ends. A rank that gives up at its deadline keeps the
    name, else one whose deadline passes a moment later would call it missing. All ranks of the run
    have the same ``job``. Linux only.
    """

    def __init__(self, job: str, rank: int, local_size: int) -> None:
        self._prefix, self._rank, self.local_size = f"\0asyncddp-{job}-", rank, local_size
        self._name = f"{self._prefix}{rank}"

    @classmethod
    def from_environment(cls, rank: int) -> InitArrivalTracker | None:
        """Create this process's tracker from the launcher's variables; None if unset."""
        size = announced("LOCAL_WORLD_SIZE")
        job = run_name()
        return None if size is None else cls(f"{os.getuid()}-{job}", rank, int(size))

    def __enter__(self) -> InitArrivalTracker:
        """Show that this rank has called ``init()``."""
        if self._name not in _arrival_sockets:
            with contextlib.suppress(OSError):
                held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                _arrival_sockets[self._name] = held
                held.bind(self._name)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Show that this rank no longer waits in ``init()``, unless its deadline has passed."""
        if kind is not WaitTimeoutError and self._name in _arrival_sockets:
            _arrival_sockets.pop(self._name).close()

    def arrived(self, size: int) -> list[int]:
        """Return the ranks of this machine that are in ``init()``, of ``size`` in all."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            return [
                other
                for other in range(size)
                if other == self._rank or not probe.connect_ex(f"{self._prefix}{other}")
            ]


@dataclass
class StartupDeadline:
    """Deadline of ``init()``: warns which ranks are late, and makes the error when it passes."""

    rank: int
    size: int
    config: Config
    end_process: Callable[[BaseException], NoReturn]  # where an exception cannot be raised
    arrival_tracker: InitArrivalTracker | None = None  # None where arrivals cannot be known
    describe_missing: Callable[[], str] | None = None  # where the transport itself knows them
    _deadline: Deadline = field(init=False)

    def __post_init__(self) -> None:
        self._deadline = Deadline(self.config)

    @classmethod
    def for_single_process(cls) -> StartupDeadline:
        """Make the deadline of a transport that is opened without ``init()``."""

        def end_process(error: BaseException) -> NoReturn:
            """Print the error and end the process."""
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)

        return cls(0, 1, Config.from_environment(), end_process)

    def check(self) -> WaitTimeoutError | None:
        """Warn once if a warning is due; return the error to raise after the deadline."""
        deadline, subject = self._deadline, f"rank {self.rank}: init()"
        waited = deadline.waited()
        if not (deadline.warns(waited) or deadline.has_passed(waited)):
            return None
        missing = self._missing()
        extra = _MPI_STARTUP_SECONDS if missing == _NONE_MISSING else 0.0
        if deadline.has_passed(waited - extra):
            return deadline.error(subject, waited, missing)
        if deadline.warns(waited - extra):
            deadline.warn(subject, waited, missing)
        return None

    def _missing(self) -> str:
        if self.describe_missing is not None:
            return self.describe_missing()
        if self.arrival_tracker is None:
            return f"not all {self.size} ranks have called it"
        arrived, here = self.arrival_tracker.arrived(self.size), self.arrival_tracker.local_size
        if here == self.size:
            missing = set(range(self.size)).difference(arrived)
            return f"missing: {list_ranks(missing)}" if missing else _NONE_MISSING
        machine = f"of machine {socket.gethostname()}"
        if len(arrived) == here:
            return f"missing: ranks of other machines; all {here} {machine} have called it"
        away = f"{here - len(arrived)} of the {here} ranks {machine}"
        return f"missing: {away}, where {list_ranks(arrived)} are here"


Settings: TypeAlias = dict[str, str | int | bool | None]


def shared_settings(config: Config, default_transport: str) -> Settings:
    """List this rank's settings that must be equal on all ranks, keyed by variable name."""
    return {
        "the version of asyncddp": asyncddp.__version__,
        "ASYNCDDP_TRANSPORT": config.transport or default_transport,
        "ASYNCDDP_DEVICE_TRANSPORTS": config.device_transports,
        "ASYNCDDP_RANKS_PER_MACHINE": config.ranks_per_machine,
        "ASYNCDDP_CHECK": config.check,
        "ASYNCDDP_ELASTIC": config.elastic,
    }


def check_settings(rank: int, every: Sequence[Settings]) -> None:
    """Raise a MismatchError for the first rank whose settings differ from those of rank 0."""
    shown = [{name: repr(value) for name, value in settings.items()} for settings in every]
    claim = f"rank {rank}: init(): all ranks need the same settings"
    remedy = "; set it alike for all ranks, as asyncddp run and the -x of mpirun do"
    compare(shown, claim, remedy)
