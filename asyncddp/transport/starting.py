"""Waiting in ``init()`` until all ranks have called it: who is missing, when to warn and end."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from asyncddp.config import Config
from asyncddp.errors import WaitTimeoutError

__all__ = ["Presence", "Start"]

logger = logging.getLogger("asyncddp")

_STARTING = 60.0  # seconds that MPI itself may take once all processes have come
_HERE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_NOBODY = "all ranks have called it, but MPI has not started"


class Presence:
    """Which ranks of this machine are in ``init()``, known before there is MPI; Linux only.

    While it is open, a rank holds a name among the abstract Unix sockets of the machine, which the
    system frees when the process ends; nothing is sent and nothing is listened to.

    Args:
        job: What the ranks of one run have in common and no other run has.
        rank: This rank.
        here: How many there are on this machine.
    """

    def __init__(self, job: str, rank: int, here: int) -> None:
        self._prefix, self._rank, self.here = f"\0asyncddp-{job}-", rank, here
        self._held: socket.socket | None = None

    @classmethod
    def of(cls, rank: int, environ: Mapping[str, str]) -> Presence | None:
        """That of this process, by the launcher's variables; None where they do not tell."""
        job = environ.get("PMIX_NAMESPACE") or f"parent-{os.getppid()}"
        here = next((environ[name] for name in _HERE if name in environ), None)
        return None if here is None else cls(f"{os.getuid()}-{job}", rank, int(here))

    def __enter__(self) -> Presence:
        """This rank is in ``init()``."""
        with contextlib.suppress(OSError):
            self._held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._held.bind(f"{self._prefix}{self._rank}")
        return self

    def __exit__(self, *error: object) -> None:
        """It no longer waits."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def found(self, size: int) -> list[int]:
        """The ranks of this machine that are in ``init()``, out of so many in all."""
        return [other for other in range(size) if other == self._rank or self._holds(other)]

    def _holds(self, other: int) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(f"{self._prefix}{other}")
            except OSError:
                return False
        return True


@dataclass
class Start:
    """One rank's way into a world: how long it waits for the others, and what must agree.

    Attributes:
        rank, size: As the launcher has numbered the processes.
        config: The deadlines, and the settings that must be the same on all ranks.
        end: Ends this process, saying why, where an exception cannot be raised.
        presence: Who of this machine has come, where that can be known.
    """

    rank: int
    size: int
    config: Config
    end: Callable[[BaseException], NoReturn]
    presence: Presence | None = None
    since: float = field(default_factory=time.monotonic, init=False)
    _warned: bool = field(default=False, init=False)

    @classmethod
    def alone(cls) -> Start:
        """That of a wire which is opened without ``init()``."""

        def end(error: BaseException) -> NoReturn:
            """End the process."""
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)

        return cls(0, 1, Config.from_environment(), end)

    def look(self) -> WaitTimeoutError | None:
        """Warn once when that is due; the error to raise once the deadline has passed."""
        waited, config = time.monotonic() - self.since, self.config
        warns = waited > config.warn_after and not self._warned
        if not warns and waited <= config.timeout:
            return None
        missing = self._missing()
        extra = _STARTING if missing == _NOBODY else 0.0
        if waited > config.timeout + extra:
            return WaitTimeoutError(
                f"rank {self.rank}: init() was not done in {waited:.1f} s "
                f"(ASYNCDDP_TIMEOUT={config.timeout:g}); {missing}"
            )
        if warns and waited > config.warn_after + extra:
            self._warned = True
            logger.warning(
                "rank %d: init() has been waiting for %.0f s; %s", self.rank, waited, missing
            )
        return None

    def _missing(self) -> str:
        """Who has yet to call ``init()``."""
        if self.presence is None:
            return f"not all {self.size} ranks have called it"
        found, here = self.presence.found(self.size), self.presence.here
        if here == self.size:
            away = sorted(set(range(self.size)) - set(found))
            names = f"rank{'s' * (len(away) > 1)} {', '.join(map(str, away))}"
            return f"missing: {names}" if away else _NOBODY
        machine = f"of machine {socket.gethostname()}"
        if len(found) == here:
            return f"missing: ranks of other machines; all {here} {machine} have called it"
        return f"missing: {here - len(found)} of the {here} ranks {machine}, where {found} are here"
