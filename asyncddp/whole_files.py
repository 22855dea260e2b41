"""Files that are whole or not there, whatever ends the process that writes them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Give the block another name to write a file by, which is the file's once the block ends."""
    part = file.with_name(f"{file.name}.{os.urandom(4).hex()}.part")
    try:
        yield part
        part.replace(file)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
