"""Runs of many cases in one world of processes; each case's outcome is told to the test."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncddp as bf
from tests.support import run_on_mpirun

_MARK = "outcome: "
Case = Callable[[], Any]


def run_cases(
    module: str, names: Sequence[str], ranks: int, folder: Path, **environ: str
) -> dict[str, Any]:
    """Run cases of a module's ``CASES`` on ranks, in order; return rank 0's results by name.

    Skips the test where this torch's FSDP2 runs on GPUs alone, as that of torch 2.6 does.
    """
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip(f"FSDP2 of torch {torch.__version__} does not run on processors")
    script = f"from tests.sharded.world import main\nmain({module!r}, {list(names)!r})\n"
    settings = {"ASYNCDDP_TIMEOUT": "60", "STORE": str(folder / "store"), **environ}
    ended = run_on_mpirun(ranks, script, folder, environ=settings)
    lines = [one for one in ended.stdout.splitlines() if one.startswith(_MARK)]
    found = dict(json.loads(one.removeprefix(_MARK)) for one in lines)
    assert set(found) == set(names), ended
    assert ended.code == 0, ended
    return found


def main(module: str, names: Sequence[str]) -> None:
    """Run the cases on this rank; rank 0 prints what each gives, or how it failed on any rank."""
    torch.set_num_threads(1)
    bf.init()
    store = f"file://{os.environ['STORE']}"
    dist.init_process_group("gloo", init_method=store, rank=bf.rank(), world_size=bf.size())
    cases: dict[str, Case] = importlib.import_module(module).CASES
    for name in names:
        problem, result = "", None
        try:
            result = cases[name]()
        except Exception:  # noqa: BLE001 - told to the test
            problem = traceback.format_exc()
            sys.stderr.write(problem)
        told = bf.allgather_object((problem, result))
        problems = [one for one, _ in told if one]
        outcome = {"problems": problems, "results": [one for _, one in told]}
        if bf.rank() == 0:
            sys.stdout.write(_MARK + json.dumps((name, outcome)) + "\n")
            sys.stdout.flush()
    bf.barrier()
    dist.destroy_process_group()
    bf.shutdown()


def folder_of_all() -> Path:
    """A new folder, the same on all ranks."""
    return Path(bf.broadcast_object(tempfile.mkdtemp() if bf.rank() == 0 else None))
