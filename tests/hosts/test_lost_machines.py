"""A machine that is cut off, and one whose processes only stand still."""

import contextlib
import subprocess
import sys

import pytest

from tests.hosts.namespaces import LIMIT, SCRIPT

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

HEAD = """
import os, signal, sys, threading, time
import torch
import asyncddp as bf

bf.init(timeout=200)
x = torch.ones(2_000_000)
bf.barrier()
bf.neighbor_allreduce(x)
"""
BODIES = {
    "idle": """
print("ready", flush=True)
while not bf.current().engine.lost_peers.any:
    time.sleep(0.1)
bf.barrier()
""",
    "busy": """
print("ready", flush=True)
while True:
    bf.neighbor_allreduce(x)
""",
    "stopped": """
if bf.rank() == 1:
    pid = os.getpid()
    if os.fork() == 0:  # another process wakes this one
        os.kill(pid, signal.SIGSTOP)
        time.sleep(10)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.wait()
else:
    time.sleep(1)  # then more than the sockets hold
small = torch.ones(16_000)
for handle in [bf.neighbor_allreduce_nonblocking(small, name=str(k)) for k in range(400)]:
    handle.wait()
bf.barrier()
""",
}
ENVIRONMENT = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}


def link(state):
    """Plug the second host's cable in, or pull it."""
    subprocess.run(["ip", "link", "set", "asyncddp-v2", state], check=True)


@contextlib.contextmanager
def two_ranks(folder, body):
    """A rank without MPI on each host, which a machine's silence of three seconds is enough for."""
    script = folder / "script.py"
    script.write_text(HEAD + body)
    ranks = [
        subprocess.Popen(
            [
                *(str(SCRIPT), f"h{rank + 1}", "env", f"RANK={rank}"),
                *(f"{name}={value}" for name, value in ENVIRONMENT.items()),
                *("ASYNCDDP_NETWORK_TIMEOUT=3", sys.executable, str(script)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        link("up")
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("connection", ["idle", "busy"])
def test_a_machine_that_is_cut_off_is_named_by_both_sides(hosts, tmp_path, connection):
    """Long before the deadline of 200 s, whether bytes were under way or not."""
    with two_ranks(tmp_path, BODIES[connection]) as ranks:
        for rank in ranks:
            assert rank.stdout.readline() == "ready\n"
        link("down")
        errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    for rank, error in enumerate(errors):
        assert f"PeerLeftError: rank {rank}: " in error, error
        assert f"rank {1 - rank} has left (it cannot be reached: " in error


def test_a_process_that_is_stopped_is_not_lost(hosts, tmp_path):
    """Its machine answers, though it takes nothing for more than three times as long."""
    with two_ranks(tmp_path, BODIES["stopped"]) as ranks:
        errors = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_the_launcher_names_a_host_that_is_cut_off(hosts):
    """Ranks with MPI are ended by it, on both sides."""
    script = "print('ready', flush=True)\nimport time\ntime.sleep(280)"
    where = ("--network-interface", "10.77.0.0/24")
    environ = {"ASYNCDDP_NETWORK_TIMEOUT": "4"}
    child = hosts.start(*where, script=script, hosts="h1,h2", environ=environ)
    try:
        for _ in range(2):
            assert child.stdout.readline() == "ready\n"
        link("down")
        _, stderr = child.communicate(timeout=100)
        assert "host h2 was lost" in stderr
        assert child.returncode == 1
        assert hosts.wait_until_gone(60) == []
    finally:
        link("up")
        child.kill()
        child.communicate()
