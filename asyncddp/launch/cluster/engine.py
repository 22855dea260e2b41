"""One engine: ``python -m asyncddp.launch.cluster.engine --profile-dir FOLDER``, on every rank.

Its number is its rank. MPI is left to ``asyncddp.init()``, which a cell calls.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ipyparallel.engine.app import IPEngine

from asyncddp.launch.rank import launched_rank

__all__ = ["main"]

_PATIENCE = 60.0  # seconds for the controller to welcome an engine, as many may come at once


def main(words: Sequence[str]) -> None:
    """Serve the cells of notebooks until the cluster is stopped.

    Args:
        words: ``--profile-dir``, ``=``, and a folder, which other machines need not have.
    """
    rank = launched_rank(os.environ)
    if rank is None:
        sys.exit("an engine is a rank: start it by 'asyncddp notebook start -np N'")
    folder = Path(words[0].removeprefix("--profile-dir="))
    with tempfile.TemporaryDirectory(prefix="asyncddp-engine-") as own:
        profile = folder if folder.is_dir() else Path(own)
        settings = (f"--profile-dir={profile}", f"--timeout={_PATIENCE:g}", f"--IPEngine.id={rank}")
        IPEngine.launch_instance(argv=list(settings))


if __name__ == "__main__":
    main(sys.argv[1:])
