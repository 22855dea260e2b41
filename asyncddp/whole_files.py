"""Atomic file writes: a file is complete or absent, even if the writing process is killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Yield a temporary name; the file written there gets its final name after the block."""
    part = file.with_name(f"{file.name}.{os.urandom(4).hex()}.part")
    try:
        yield part
        part.replace(file)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
