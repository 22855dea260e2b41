"""``asyncddp notebook`` and ``ibfrun`` as people call them, and clusters whose owner is killed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.launch.hosts import parse_hosts
from asyncddp.launch.job_options import RunOptions
from asyncddp.launch.launcher_discovery import find_launcher
from asyncddp.launch.notebook_cluster.cluster_spec import build_cluster_spec, controller_address
from asyncddp.launch.notebook_cluster.profile_directory import ProfileDirectory
from asyncddp.launch.notebook_cluster.start_and_stop import start_cluster
from asyncddp.notebook import Cluster
from tests.support import RUN_LIMIT, until

pytestmark = pytest.mark.mpi(2)

NOTEBOOK = (sys.executable, "-m", "asyncddp", "notebook")
IBFRUN = (sys.executable, "-c", "from asyncddp.cli.notebook_command import ibfrun; ibfrun()")
OWNER = """
import sys, time
from asyncddp.notebook import Cluster
cluster = Cluster(1, timeout=200)
print(cluster._profile_directory.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def profiles(tmp_path, monkeypatch, mpi):
    """Profiles of the test's own."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    return tmp_path


def call(*words):
    """Run a command to its end."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=RUN_LIMIT, check=False)
    return done.returncode, done.stdout + done.stderr


def ended(process, limit=RUN_LIMIT):
    """Wait for a process's end."""
    process.communicate(timeout=limit)
    return process.returncode


def test_ibfrun_starts_a_cluster_that_notebooks_drive_until_it_is_stopped(marked):
    """It outlives its shell; starting twice says so; after stop nothing is left."""
    ipyparallel = pytest.importorskip("ipyparallel")
    code, said = call(*IBFRUN, "start", "-np", "2", "--start-timeout", "200")
    assert code == 0, said
    assert "2 ranks are ready" in said
    assert "Cluster.connect(profile='bluefog')" in said
    assert said.endswith("To end them: ibfrun stop\n")
    code, said = call(*IBFRUN, "start", "-np", "2")
    assert code == 1
    assert re.search(
        r"a cluster runs already under profile 'bluefog': 2 ranks, started at .* End it first, by "
        r"'asyncddp notebook stop --profile bluefog', or give another --profile",
        said,
    )
    with ipyparallel.Client(profile="bluefog") as client:  # as BlueFog's users do
        assert client.ids == [0, 1]
    with Cluster.connect("bluefog") as cluster:
        rank = cluster.view.apply_sync(lambda: __import__("os").environ["OMPI_COMM_WORLD_RANK"])
        assert [int(one) for one in rank] == cluster.client.ids == [0, 1]
        assert repr(cluster) == "<Cluster of 2 ranks, connected>"
    code, said = call(*IBFRUN, "status")
    assert (code, "profile 'bluefog': 2 ranks" in said) == (0, True), said
    code, said = call(*IBFRUN, "stop")
    assert (code, "the cluster has ended" in said) == (0, True), said
    assert marked.left() == []
    assert call(*IBFRUN, "stop") == (0, "profile 'bluefog': no cluster runs\n")
    assert call(*NOTEBOOK, "status", "--profile", "bluefog")[0] == 1
    with pytest.raises(EnvironmentProblem, match=r"no cluster runs under profile 'bluefog': start"):
        Cluster.connect("bluefog")


def test_ctrl_c_ends_a_cluster_in_the_foreground(marked, profiles):
    """SIGINT ends ``notebook start --foreground`` with exit code 0, and no process is left."""
    with (profiles / "said").open("w") as said:
        process = subprocess.Popen(
            [*NOTEBOOK, "start", "-np", "1", "--foreground", "--start-timeout", "200"],
            stdout=said,
            stderr=said,
        )
    while "ready" not in (profiles / "said").read_text():
        assert process.poll() is None, (profiles / "said").read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert ended(process) == 0
    assert marked.left(0.0) == []
    assert "The cluster has ended." in (profiles / "said").read_text()


@pytest.mark.parametrize("victim", ["owner", "daemon"])
def test_nothing_outlives_a_killed(victim, marked, profiles):
    """After SIGKILL of a cluster's owner or its daemon, no other process of it stays."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    folder = owner.stdout.readline().strip()
    assert len(marked.lines()) > 4, "owner, daemon, controller, launcher, engine"
    killed = owner if victim == "owner" else marked.one("cluster.daemon")
    os.kill(killed.pid, signal.SIGKILL)
    if victim == "daemon":
        until(lambda: len(marked.lines()) <= 1, "the end of all but the owner")
        assert [process.pid for process in marked.processes()] == [owner.pid]
        owner.kill()
    ended(owner)
    assert marked.left() == []
    assert victim == "daemon" or not Path(folder).exists()


def test_a_launcher_that_hangs_ends_in_its_words(marked, profiles):
    """A wrapper around the real launcher that never comes to start it."""
    ipyparallel = pytest.importorskip("ipyparallel")
    found = find_launcher(None, os.environ)
    launcher = profiles / "mpirun"
    launcher.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec "{found.executable}" --version\n'
        "echo 'waiting for a daemon on h1' >&2\nexec sleep 300\n"
    )
    launcher.chmod(0o755)
    running = start_cluster(
        build_cluster_spec(RunOptions(num_proc=2, launcher=str(launcher))), timeout=200
    )
    try:
        with ipyparallel.Client(str(running.profile_directory.client_file), timeout=60) as client:
            while "daemon" not in running.profile_directory.log_tail("engines"):
                time.sleep(0.05)
            with pytest.raises(EnvironmentProblem) as caught:
                running.wait_for_engines(client, 0.5)
    finally:
        running.stop()
    assert str(caught.value) == (
        "0 of 2 engines answered within 0.5 s; the launcher said:\nwaiting for a daemon on h1"
    )
    assert marked.left(0.0) == []


def test_a_launcher_that_fails_ends_in_its_words(marked):
    """If the launcher fails, ``notebook start`` exits with 1 and the launcher's message."""
    code, said = call(*NOTEBOOK, "start", "-np", "2", "--mpi-args=--no-such-option-of-mpirun")
    assert code == 1
    assert "the cluster has ended. engines: ended with exit code" in said
    assert "no-such-option-of-mpirun" in said
    assert marked.left(0.0) == []


def test_what_cannot_be_is_said_before_anything_is_started(monkeypatch):
    """Wrong numbers, profiles and interfaces raise ``ArgumentError`` before a process starts."""
    with pytest.raises(ArgumentError, match="-np: say how many engines to start"):
        build_cluster_spec(RunOptions())
    with pytest.raises(ArgumentError, match=r"profile: expected letters, digits.*, got '\.\./x'"):
        ProfileDirectory.for_profile("../x")
    with pytest.raises(ArgumentError, match="Cluster: argument n: expected at least 1 rank, got 0"):
        Cluster(0)
    hosts = parse_hosts("10.1.1.1:2")
    with pytest.raises(ArgumentError, match="has no IPv4 address at 'nosuch0'; it has lo"):
        controller_address(hosts, "nosuch0", remote=True)
    with pytest.raises(ArgumentError, match=r"no IPv4 address at '233\.252\.0\.0/24'"):
        controller_address(hosts, "233.252.0.0/24", remote=True)
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    with pytest.raises(ArgumentError, match="say by --network-interface through which"):
        controller_address((), None, remote=True)
    assert controller_address(hosts, "lo", remote=True) == "127.0.0.1"
    assert controller_address(hosts, "127.0.0.0/8", remote=True) == "127.0.0.1"


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    """Without ipyparallel or IPython the error names the package that is missing."""
    monkeypatch.setitem(sys.modules, "ipyparallel", None)
    with pytest.raises(
        EnvironmentProblem, match=r"pip install 'ipykernel>=6\.25' 'ipyparallel>=8\.8'"
    ):
        Cluster(1)
    monkeypatch.setitem(sys.modules, "IPython.paths", None)
    with pytest.raises(EnvironmentProblem, match=r"notebooks need IPython .*; install it"):
        ProfileDirectory.for_profile("asyncddp")


def test_one_machine_of_a_batch_system_needs_no_network(monkeypatch):
    """On a job of one machine the controller is on the loopback, without encryption."""
    for name, value in (("JOB_ID", "1"), ("NTASKS", "2"), ("JOB_NUM_NODES", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    plan = build_cluster_spec(RunOptions(num_proc=2))
    assert (plan.ranks, plan.address, plan.encrypted) == (2, "127.0.0.1", False)
