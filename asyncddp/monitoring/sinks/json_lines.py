"""Sink that writes monitor reports to a file of JSON lines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from asyncddp.errors import ArgumentError
from asyncddp.monitoring.rank_record import Record

logger = logging.getLogger("asyncddp")


class JsonLinesSink:
    """Sink that writes one JSON object per rank and report, unbuffered.

    A run that is killed leaves whole lines. A disk that is full ends the file with a warning, not
    the run.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self._path = path
        self._file: FileIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab" if append else "wb", buffering=0)
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
