"""Deadline of one wait: times of the warning and of giving up, and the texts of both messages."""

from __future__ import annotations

import logging
import time

from asyncddp.config import Config
from asyncddp.errors import WaitTimeoutError

logger = logging.getLogger("asyncddp")


class Deadline:
    """Deadline of one wait: the times of warning and giving up, from the configured timeouts.

    A ``timeout`` of the wait's own, in seconds, replaces the configured one.
    """

    def __init__(self, config: Config, timeout: float | None = None) -> None:
        self._config, self._warned = config, False
        self._timeout, self._is_own = timeout or config.timeout, timeout is not None
        self._patience = min(config.warn_after, self._timeout)  # until the warning or the error
        self._begun = time.monotonic()
        self.renew(self._begun)

    def renew(self, now: float) -> None:
        """Restart the wait at ``now``, because the awaited operation has made progress."""
        self.started, self.due = now, now + self._patience

    def waited(self) -> float:
        """Return the seconds since the wait began or was renewed."""
        return time.monotonic() - self.started

    def has_passed(self, waited: float) -> bool:
        """Return whether a wait of ``waited`` seconds has exceeded the timeout."""
        return waited > self._timeout

    def warns(self, waited: float) -> bool:
        """Return whether a warning is due after a wait of ``waited`` seconds; it is given once."""
        return waited > self._config.warn_after and not self._warned

    def mark_warned(self) -> None:
        """Record that the warning has been given."""
        self._warned, self._patience = True, self._timeout
        self.due = self.started + self._patience

    def warn(self, subject: str, waited: float, missing: str) -> None:
        """Log that a subject, such as ``rank 0: init()``, has been waiting, and what is missing."""
        self.mark_warned()
        logger.warning("%s has been waiting for %.0f s; %s", subject, waited, missing)

    def error(self, subject: str, waited: float, missing: str) -> WaitTimeoutError:
        """Build the error for a wait whose deadline has passed."""
        if self._is_own:
            return WaitTimeoutError(f"{subject} was not done in {self._timeout:g} s; {missing}")
        return WaitTimeoutError(
            f"{subject} was not done in {waited:.1f} s"
            f"{' after its last progress' if self.started > self._begun + 1.0 else ''}"
            f" (ASYNCDDP_TIMEOUT={self._timeout:g}); {missing}"
        )
