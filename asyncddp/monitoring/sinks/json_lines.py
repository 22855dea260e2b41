"""Reports as lines of JSON in a file that can be read at any time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from asyncddp.errors import ArgumentError
from asyncddp.monitoring.record import Record

__all__ = ["JsonLinesSink"]

logger = logging.getLogger("asyncddp")


class JsonLinesSink:
    """Writes one object per rank and report; each line is with the system before the next step.

    A run that is killed leaves whole lines. A disk that is full ends the file with a warning, not
    the run.

    Args:
        path: The file; folders are made.
        again: Whether to go on with what is there.

    Raises:
        ArgumentError: It cannot be written.
    """

    def __init__(self, path: Path, *, again: bool = False) -> None:
        self._path = path
        self._file: FileIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab" if again else "wb", buffering=0)
        except OSError as error:
            raise ArgumentError(
                f"monitor: argument to: cannot write {path}: {error.strerror}; give a file in a "
                "folder that rank 0 can write to"
            ) from error

    def write(self, records: Sequence[Record]) -> None:
        """Append a line for each record."""
        if self._file is None:
            return
        try:
            self._file.write("".join(record.as_json() + "\n" for record in records).encode())
        except OSError as error:
            logger.warning("monitor: %s: %s; it ends here", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
