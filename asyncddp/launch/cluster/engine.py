"""One engine: ``python -m asyncddp.launch.cluster.engine --profile-dir=FOLDER``, on every rank.

Its number is its rank. MPI is left to ``asyncddp.init()``, which a cell calls.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ipyparallel.engine.app import IPEngine

from asyncddp.launch.cluster.cells import register
from asyncddp.launch.cluster.plan import MISSES
from asyncddp.launch.rank import launched_rank

__all__ = ["Engine", "main"]

_PATIENCE = 60.0  # seconds for the controller to welcome an engine, as many may come at once


class Engine(IPEngine):  # type: ignore[misc]  # ipyparallel has no types
    """An engine of ipyparallel whose cells are watched."""

    async def complete_registration(self, *args: Any) -> None:
        """Begin to serve, once the controller has answered."""
        await super().complete_registration(*args)
        register(self.kernel)


def main(words: Sequence[str]) -> None:
    """Serve the cells of notebooks until the cluster is stopped.

    Args:
        words: ``--profile-dir=`` and a folder, which other machines need not have.
    """
    rank = launched_rank(os.environ)
    if rank is None:
        sys.exit("an engine is a rank: start it by 'asyncddp notebook start -np N'")
    folder = Path(words[0].removeprefix("--profile-dir="))
    with tempfile.TemporaryDirectory(prefix="asyncddp-engine-") as own:
        profile = folder if folder.is_dir() else Path(own)
        settings = [f"--profile-dir={profile}", f"--timeout={_PATIENCE:g}", f"--Engine.id={rank}"]
        Engine.launch_instance(argv=[*settings, f"--Engine.max_heartbeat_misses={MISSES}"])


if __name__ == "__main__":
    main(sys.argv[1:])
