"""Deadline of one wait: when to warn, when to give up, and the texts of both messages."""

from __future__ import annotations

import logging
import time

from asyncddp.config import Config
from asyncddp.errors import WaitTimeoutError

logger = logging.getLogger("asyncddp")


class Deadline:
    """Deadline of one wait: when to warn and when to give up, by the configured timeouts.

    A ``timeout`` of the wait's own, in seconds, replaces the configured one.
    """

    def __init__(self, config: Config, timeout: float | None = None) -> None:
        self._config, self._warned = config, False
        self._timeout, self._is_own = timeout or config.timeout, timeout is not None
        self._patience = min(config.warn_after, self._timeout)  # until the warning or the error
        self._begun = time.monotonic()
        self.renew(self._begun)

    def renew(self, now: float) -> None:
        """Count the wait from ``now`` on, since what is waited for has made progress."""
        self.started, self.due = now, now + self._patience

    def waited(self) -> float:
        """Return the seconds since the wait began or was renewed."""
        return time.monotonic() - self.started

    def has_passed(self, waited: float) -> bool:
        """Tell whether a wait of so many seconds is too long."""
        return waited > self._timeout

    def warns(self, waited: float) -> bool:
        """Tell whether a warning is due after a wait of so many seconds; there is only one."""
        return waited > self._config.warn_after and not self._warned

    def mark_warned(self) -> None:
        """Note that the warning has been given."""
        self._warned, self._patience = True, self._timeout
        self.due = self.started + self._patience

    def warn(self, subject: str, waited: float, missing: str) -> None:
        """Log that a subject, such as ``rank 0: init()``, has been waiting, and what is missing."""
        self.mark_warned()
        logger.warning("%s has been waiting for %.0f s; %s", subject, waited, missing)

    def error(self, subject: str, waited: float, missing: str) -> WaitTimeoutError:
        """Build the error of a wait whose deadline has passed."""
        if self._is_own:
            return WaitTimeoutError(f"{subject} was not done in {self._timeout:g} s; {missing}")
        return WaitTimeoutError(
            f"{subject} was not done in {waited:.1f} s"
            f"{' after its last progress' if self.started > self._begun + 1.0 else ''}"
            f" (ASYNCDDP_TIMEOUT={self._timeout:g}); {missing}"
        )
