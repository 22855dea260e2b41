"""Spare process of an elastic run: ``python -m asyncddp.checkpoint.spare_process SCRIPT.py …``.

It imports what a replacement needs while all ranks live. Then it waits for the variables of a rank
on standard input, a line of JSON, and runs the script as :mod:`asyncddp.launch.rank` does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncddp.config import set_defaults
from asyncddp.launch import rank


def _import_all() -> None:
    """Import what scripts use with :class:`~asyncddp.ElasticState`."""
    import torch

    import asyncddp.checkpoint.elastic_state
    import asyncddp.optim.distributed_optimizer  # noqa: F401

    torch.optim.SGD([torch.nn.Parameter()], lr=0.0)  # the first optimizer imports half of torch


def main(words: Sequence[str]) -> None:
    """Wait for a rank's variables, and be that rank; end where none come, since all have ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which ends the ranks
    rank.set_variables()
    _import_all()
    variables = sys.stdin.buffer.readline()
    if not variables:
        return
    set_defaults(json.loads(variables))
    with Path(os.devnull).open("rb") as empty:
        os.dup2(empty.fileno(), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank.main(words)


if __name__ == "__main__":
    main(sys.argv[1:])
