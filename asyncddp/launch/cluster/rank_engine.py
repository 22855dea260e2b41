"""ipyparallel engine of one rank: the process of that rank, in which notebook cells run.

Its engine id is its rank. MPI is initialised by ``asyncddp.init()``, which a cell calls.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ipyparallel.engine.app import IPEngine

from asyncddp.launch.cluster.cell_hooks import install_cell_hooks
from asyncddp.launch.cluster.spec import MAX_MISSED_HEARTBEATS
from asyncddp.launch.rank import launched_rank

_REGISTRATION_TIMEOUT = 60.0  # seconds, as many engines may register at once


class RankEngine(IPEngine):  # type: ignore[misc]  # ipyparallel has no types
    """ipyparallel engine of one rank, which tells its peers when a notebook cell has failed."""

    async def complete_registration(self, *args: Any) -> None:
        """Install the cell hooks once the controller has registered the engine."""
        await super().complete_registration(*args)
        install_cell_hooks(self.kernel)


def main(words: Sequence[str]) -> None:
    """Run an engine on this rank; the profile directory need not exist on this machine."""
    rank = launched_rank(os.environ)
    if rank is None:
        sys.exit("an engine is a rank: start it by 'asyncddp notebook start -np N'")
    directory = Path(words[0].removeprefix("--profile-dir="))
    with tempfile.TemporaryDirectory(prefix="asyncddp-engine-") as own:
        profile = directory if directory.is_dir() else Path(own)
        settings = [f"--profile-dir={profile}", f"--timeout={_REGISTRATION_TIMEOUT:g}"]
        settings.append(f"--RankEngine.id={rank}")
        RankEngine.launch_instance(
            argv=[*settings, f"--RankEngine.max_heartbeat_misses={MAX_MISSED_HEARTBEATS}"]
        )


if __name__ == "__main__":
    main(sys.argv[1:])
