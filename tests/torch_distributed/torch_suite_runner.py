"""Runs torch's own tests of a backend on the ranks of one run: ``asyncddp run -np 4`` this file.

The tests are those of ``DistributedTest._DistTestBase``, which torch's wheel holds. Each begins
with ``init_process_group`` and ends with ``destroy_process_group``. Rank 0 prints a line for each
test, and at the end one of JSON: how many passed, why others were skipped, and what failed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import asyncddp.integrations.torch_distributed as backend
from asyncddp.integrations.torch_distributed.world import TorchWorld

GROUP_TIMEOUT = timedelta(seconds=60)
NAME = "mpi"  # of the backend, for the tests
NEED_TORCHVISION = ("test_SyncBatchNorm_process_group",)
TEST_LIMIT = 240.0  # seconds after which the run ends, with the stacks of all threads


def prepare(folder: str, size: int) -> None:
    """Set what torch's tests read from the environment, and tell them what the backend can do.

    To them it is ``mpi``, since they ask for the names of torch's own backends.
    """
    os.environ.update(BACKEND=NAME, WORLD_SIZE=str(size), TEMP_DIR=folder)
    dist.is_mpi_available = dist.distributed_c10d.is_mpi_available = lambda: True
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("ddp", "subgroup"):
        DistTestCases.backend_feature[feature] |= {NAME}
    DistTestCases.skip_collective["allgather_coalesced"] -= {NAME}


def test_class(rank: int) -> Any:
    """Make the class of the tests, whose set-up joins the group in place of starting processes."""
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test

    class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            TestCase.setUp(self)
            self.rank = rank
            self.skip_return_code_checks, self.special_return_code_checks = [], {}
            if rank == 0:
                distributed_test.Barrier.init()
            distributed_test.Barrier.barrier_id = 0
            dist.init_process_group(backend.BACKEND, init_method="mpi://", timeout=GROUP_TIMEOUT)
            dist.barrier()

        def tearDown(self) -> None:
            if dist.is_initialized():
                dist.destroy_process_group()

    return Tests


def outcome_of(cases: Any, name: str) -> str:
    """Run one test on this rank: "passed", "skipped: why" or what failed."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    method = getattr(cases, name)
    if getattr(method, "__unittest_skip__", False):
        return f"skipped: {method.__unittest_skip_why__}"
    if "cuda" in name and not torch.cuda.is_available():
        return "skipped: CUDA is not available."
    if name in NEED_TORCHVISION and find_spec("torchvision") is None:
        return "skipped: torchvision is not installed."
    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    output, test = io.StringIO(), cases(name)
    try:
        with contextlib.redirect_stderr(output):
            test.setUp()
            getattr(test, name)()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as end:
        return f"skipped: {skips.get(end.code, f'exit code {end.code}')}"
    except BaseException:  # noqa: BLE001 - whatever fails is reported
        return f"failed: {traceback.format_exc()}\n{output.getvalue()}"
    finally:
        with contextlib.suppress(RuntimeError):
            test.tearDown()
    return "passed"


def gather_outcomes(mine: str) -> list[str]:
    """Return the outcomes of all ranks, by way of the transport below the groups."""
    world = TorchWorld.open(GROUP_TIMEOUT.total_seconds()).every
    data = torch.tensor(list(mine.encode()[:20_000]), dtype=torch.uint8)
    counts = torch.tensor([data.numel()])
    sizes = world.allgather(counts, [1] * world.size, 2 * TEST_LIMIT).tolist()
    whole = world.allgather(data, sizes, 60.0)
    return [bytes(part.tolist()).decode() for part in torch.split(whole, sizes)]


def summary_of(outcomes: Sequence[str]) -> str:
    """Return the outcome of a test on all ranks."""
    for kind in ("failed", "skipped"):
        for rank, outcome in enumerate(outcomes):
            if outcome.startswith(kind):
                return outcome if kind == "skipped" else f"failed on rank {rank}{outcome[6:]}"
    return "passed"


def main(names: Sequence[str]) -> None:
    """Run the tests of these names, or all."""
    found: dict[str, str] = {}
    world = TorchWorld.open(GROUP_TIMEOUT.total_seconds()).every
    rank, size = world.rank, world.size
    with tempfile.TemporaryDirectory() as folder:
        path = torch.zeros(4096, dtype=torch.uint8)
        path[: len(folder.encode())] = torch.tensor(list(folder.encode()), dtype=torch.uint8)
        world.broadcast(path, 0, 60.0)
        shared = bytes(path.tolist()).rstrip(b"\0").decode()
        if rank == 0:
            for inner in ("barrier", "test_dir", "init_dir"):
                Path(shared, inner).mkdir()
        world.barrier(60.0)
        prepare(shared, size)
        cases = test_class(rank)
        chosen = list(names) or [name for name in dir(cases) if name.startswith("test_")]
        for name in chosen:
            faulthandler.dump_traceback_later(TEST_LIMIT, exit=True)
            begun = time.monotonic()
            found[name] = summary_of(gather_outcomes(outcome_of(cases, name)))
            if rank == 0:
                sys.stdout.write(f"{time.monotonic() - begun:6.2f} s {name}: {found[name]}\n")
                sys.stdout.flush()
        faulthandler.cancel_dump_traceback_later()
        world.barrier(60.0)
    if rank == 0:
        sys.stdout.write(f"RESULT {json.dumps(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
