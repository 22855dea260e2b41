"""Runs of torch elastic and torchft, whose ranks make the steps of DistributedDataParallel."""

from __future__ import annotations

import socket
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from benchmarks.elastic.killed_runs import Launch, loop_words
from benchmarks.elastic.rank_loops import TORCH_ELASTIC, TORCHFT
from benchmarks.tables import RivalUnavailableError

_PACKAGE = "torchft-nightly"
_ENV = ("env", "GLOO_SOCKET_IFNAME=lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")


def torch_elastic_launch(ranks: int) -> Launch:
    """Torchrun, which restarts all its workers after a death."""
    torchrun = [*_ENV, sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node", str(ranks), "--max-restarts", "1000"]
    return Launch(ranks, [[*torchrun, *options, *loop_words(TORCH_ELASTIC)]], replaces=True)


def torchft_launch(python: Path, ranks: int, heartbeat_timeout: float) -> Launch:
    """Start replicas of one process each, and their lighthouse, as torchft's README does.

    Args:
        python: That of :func:`torchft_python`.
        ranks: How many replicas.
        heartbeat_timeout: Seconds of silence after which the lighthouse takes one for dead.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    options += ["--heartbeat_timeout_ms", f"{1000 * heartbeat_timeout:.0f}", "--bind", place]
    lighthouse = [str(python.with_name("torchft_lighthouse")), *options]
    replica = [*_ENV, f"TORCHFT_LIGHTHOUSE=http://{place}", "RANK=0", "WORLD_SIZE=1"]
    loop = [str(python), *loop_words(TORCHFT)]
    replicas = [[*replica, f"REPLICA={number}", *loop] for number in range(ranks)]
    return Launch(ranks, [lighthouse, *replicas])


def torchft_python() -> Path:
    """Return the Python of an environment with torchft, which is made beside this one.

    It has torchft and what that needs besides, and sees this one's packages: the same torch.

    Raises:
        RivalUnavailableError: torchft cannot be installed or loaded.
    """
    folder = Path(f"{sys.prefix}-torchft")
    python = folder / "bin" / "python"
    load = [str(python), "-c", "import torchft"]
    if not python.exists() or subprocess.run(load, capture_output=True, check=False).returncode:
        venv.create(folder, clear=True, with_pip=True)
        site = next(folder.glob("lib/python*/site-packages"))
        here = sysconfig.get_path("purelib")
        seen = f"import site; site.addsitedir({here!r})\n"
        (site / "beside.pth").write_text(seen, encoding="utf-8")
        for words in ([str(python), "-m", "pip", "install", _PACKAGE], load):
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
                raise RivalUnavailableError(f"{' '.join(words[1:])} failed: {reason}")
    return python
