"""Program on every rank that a benchmark starts: runs a function, and writes what rank 0 got.

usage: python -m benchmarks.rank MODULE:FUNCTION ARGUMENTS --out FILE; the arguments are JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main() -> None:
    """Run the function on this rank; it enters the world itself."""
    work, given, _, out = sys.argv[1:]
    module, _, name = work.partition(":")
    found = getattr(importlib.import_module(f"benchmarks.{module}"), name)(**json.loads(given))
    import torch
    from mpi4py import MPI  # begun by the function, if not by the world

    if MPI.COMM_WORLD.rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
