"""Ranks that leave while others communicate by NCCL: the others hear of it in bounded time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from tests.support.processes import environment

RANKS = 4
TIMEOUT = 15.0  # seconds, of the ranks' verbs
LIMIT = 150.0

SCRIPT = """
import os, signal, sys, time
import torch
import asyncddp as bf
bf.init(timeout={timeout})
rank, how = bf.rank(), sys.argv[1]
choice = bf.current().device_choice
bf.set_topology(bf.topology.exponential_two(bf.size()))
x = torch.full((100_000,), float(rank), device=f"cuda:{{bf.current().default_gpu}}")
began = time.monotonic()
print("uses", choice.transport, dict(choice.refused), flush=True)
try:
    for step in range(200):
        if rank == 3 and step == 5:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stopped":
                time.sleep(4 * {timeout})
            print("gone", flush=True)
            os._exit(0)
        began = time.monotonic()
        x = bf.neighbor_allreduce(x)
        total = bf.allreduce(torch.ones(10, device=x.device), average=False)
        assert total.tolist() == [bf.size()] * 10
except (bf.PeerError, bf.WaitTimeoutError) as problem:
    print("told", type(problem).__name__, round(time.monotonic() - began, 1), problem, flush=True)
    os._exit(3)
"""


def _started(rank, port, folder, how):
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ASYNCDDP_DEVICE_TRANSPORTS": "nccl"}
    path = folder / "script.py"
    path.write_text(SCRIPT.format(timeout=TIMEOUT), encoding="utf-8")
    with (folder / f"{rank}.out").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, str(path), how],
            env=environment({name: str(value) for name, value in given.items()}),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_others_are_told(tmp_path, how):
    """A rank that is killed or stops is a PeerError or a timeout on every other rank."""
    if torch.cuda.device_count() < RANKS and "ranks_share_a_gpu" not in os.environ.get(
        "PYTHONPATH", ""
    ):
        pytest.skip("NCCL has a GPU for each rank; scripts/gpu --share hosts has ranks share one")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [_started(rank, port, tmp_path, how) for rank in range(RANKS)]
    deadline = time.monotonic() + LIMIT
    try:
        for process in processes[:3]:
            process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    texts = [(tmp_path / f"{rank}.out").read_text() for rank in range(RANKS)]
    if any("cannot import cupy" in text for text in texts):
        pytest.skip(texts[0])
    assert all("uses nccl" in text for text in texts), texts
    for rank in range(3):
        assert "told" in texts[rank], (rank, processes[rank].returncode, texts)
