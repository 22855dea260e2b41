"""scripts/bench network: hosts of its own, steps and bytes over their links, nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.processes import REPO, environment, run_to_end, warm_python, warm_server

SCRIPTS = str(REPO / "scripts")
PATH = os.pathsep.join((SCRIPTS, str(REPO)))
COMMAND = [sys.executable, "-m", "benchmarks", "network-steps", "--quick"]
PNG = b"\x89PNG\r\n\x1a\n"
OURS = ("gradient_allreduce", "one-peer AWC", "one-peer ATC", "one-peer ATC in backward")
METHODS = ("DDP gloo", "MPI Allreduce after backward", *OURS)


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


@pytest.fixture
def _can_have_hosts():
    from benchmarks.network.hosts import refusal

    if problem := refusal():
        pytest.skip(problem)


def spaces() -> set[str]:
    return {path.name for path in Path("/run/netns").glob("asyncddp-h*")}


@pytest.mark.nightly
@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.usefixtures("_can_have_hosts")
def test_quick_run_measures_every_method_between_two_hosts(tmp_path):
    """Between two, all send their model once; the hosts are gone afterwards."""
    files = ["--json", "out.json", "--plot", "out.png"]
    done = run_to_end(
        [warm_python(), *COMMAND[1:], "--rounds", "2", *files],
        cwd=tmp_path,
        timeout=200,
        environ={"PYTHONPATH": PATH},
    )
    assert done.code == 0, done
    assert not spaces()
    found = json.loads((tmp_path / "out.json").read_text())
    steps, sent = found["sheets"]
    assert [line["cells"][0] for line in steps["lines"]] == ["local step", *METHODS]
    assert [line["cells"][0] for line in sent["lines"]] == [
        f"{name}, 2 hosts, 1 Gbit/s" for name in METHODS
    ]
    model = 16 * 256**2 * 4
    for line in sent["lines"]:
        _, _, own, interface, ratio, headers = line["cells"]
        assert own == (pytest.approx(1, abs=1e-4) if line["cells"][0].startswith(OURS) else "")
        assert model < int(interface.replace(",", "")) < 1.05 * model
        assert float(ratio) < float(headers) < 1.1
    assert sum(line["aim"] is not None for line in sent["lines"]) == 3
    timed = {row["rival"]: row["median"] for row in found["results"]}
    assert all(timed[name] > 0.02 for name in ("local step", *METHODS))
    assert all(timed[name] > model * 8 / 1e9 for name in METHODS if name != "one-peer AWC")
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.usefixtures("_can_have_hosts")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 1, marks=pytest.mark.nightly)],
)
def test_hosts_are_taken_down_when_the_bench_is_ended(tmp_path, number, code):
    """Ctrl-C or SIGTERM in the middle of a run leaves neither hosts nor ranks."""
    environ = environment({"PYTHONPATH": PATH})
    child = subprocess.Popen(COMMAND, cwd=tmp_path, env=environ, stderr=subprocess.PIPE)
    try:
        assert child.stderr is not None
        deadline = time.monotonic() + 60
        while len(running()) < 3 and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(running()) >= 3, "the command, mpirun, a rank"
        child.send_signal(number)
        child.communicate(timeout=30)
    finally:
        child.kill()
        child.wait()
        child.stderr.close()
    assert child.returncode == code
    assert not spaces()
    assert not running()


def running() -> list[int]:
    """Processes that start or run the bench's module on hosts."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "network.steps.step_rank:measure" in process.cmdline():
                found.append(process.pid)
    return found


def test_where_no_hosts_can_be_made_it_says_why_and_ends_with_1(tmp_path):
    """Here without the tool that makes them: a folder that has bash and little else."""
    for tool in ("bash", "uname", "id", "dirname"):
        place = next(p for p in ("/bin", "/usr/bin") if (Path(p) / tool).exists())
        (tmp_path / tool).symlink_to(Path(place) / tool)
    environ = {"PYTHONPATH": PATH, "PATH": str(tmp_path)}
    done = run_to_end(warm_server().command(*COMMAND[1:]), cwd=tmp_path, environ=environ)
    assert done.code == 1
    assert "network measures between hosts of its own, and no hosts can be made here" in done.stderr
    assert "needs " in done.stderr


def test_the_bench_s_own_process_joins_no_mpi(tmp_path):
    """Whoever starts mpirun must not be a rank of anything."""
    script = (
        "import importlib, sys\n"
        "from benchmarks.__main__ import APART\n"
        "for module in APART.values(): importlib.import_module(f'benchmarks.{module}')\n"
        "sys.exit('mpi4py.MPI' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    assert run_to_end(command, cwd=tmp_path, environ={"PYTHONPATH": PATH}).code == 0
