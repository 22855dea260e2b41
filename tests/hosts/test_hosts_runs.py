"""Runs over two hosts that share no memory, on a network with a rate."""

import json
import re
import signal
import time

import psutil
import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

NETWORK = ("--network-interface", "10.77.0.0/24")
WHERE = """
import json, os, socket, sys
print(json.dumps({
    "rank": int(os.environ["OMPI_COMM_WORLD_RANK"]),
    "host": socket.gethostname(),
    "argv": sys.argv[1:],
    "environment": dict(os.environ),
}))
"""
MEETING = """
from torch.distributed import rendezvous
store, rank, size = next(rendezvous("env://"))
store.add("ranks", 1)
while store.add("ranks", 0) < size:
    pass
store.add("left", 1)
while rank == 0 and store.add("left", 0) < size:
    pass
"""
WAITING = """
import os, socket, sys, time
import asyncddp as bf
bf.init()
print("ready", bf.rank(), os.getpid(), flush=True)
time.sleep(0.5)
if bf.rank() == {victim}:
    os.kill(os.getpid(), 9)
time.sleep(300)
"""
SOON = 120.0  # seconds: ten for the run, the rest for a busy machine; ranks sleep for 300


def seen(ended):
    code, stdout, stderr = ended
    assert code == 0, stderr
    found = [json.loads(line) for line in stdout.splitlines()]
    return sorted(found, key=lambda one: one["rank"])


@pytest.mark.parametrize("interface", ["10.77.0.0/24", "e0"])
def test_ranks_run_on_the_hosts_that_were_named_in_that_order(hosts, interface):
    """Ranks fill the slots host by host, with the interface given by subnet or by name."""
    ranks = seen(hosts.run("--network-interface", interface, script=WHERE))
    assert [one["host"] for one in ranks] == ["h1", "h1", "h2", "h2"]


def test_ranks_are_shared_out_over_hosts_without_slots(hosts):
    """The first host gets the odd rank, and is where torch's env:// rendezvous is."""
    ranks = seen(hosts.run("-np", "3", *NETWORK, script=MEETING + WHERE, hosts="h2,h1"))
    assert [one["host"] for one in ranks] == ["h2", "h2", "h1"]
    assert {one["environment"]["MASTER_ADDR"] for one in ranks} == {"h2"}, "of rank 0"
    assert [one["environment"]["RANK"] for one in ranks] == ["0", "1", "2"]
    assert {one["environment"]["WORLD_SIZE"] for one in ranks} == {"3"}


def test_what_was_asked_for_reaches_the_other_host_unchanged(hosts):
    """No shell on the way interprets arguments or the values of -x."""
    hostile = ["a b", "$HOME", "'", ";id"]
    path = hosts.folder / "script.py"
    path.write_text(WHERE)
    arguments = ["-x", "LR=a b;$c'", *NETWORK, str(path), *hostile]
    for one in seen(hosts.run(*arguments)):
        assert one["argv"] == hostile
        assert one["environment"]["LR"] == "a b;$c'"
        assert int(one["environment"]["OMP_NUM_THREADS"]) >= 1


def test_variables_of_gpu_libraries_reach_the_other_host(hosts):
    """CUDA_*, NCCL_* and PYTORCH_* are on all hosts; which GPUs are visible is each host's own."""
    told = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_DEBUG": "WARN", "PYTORCH_ALLOC_CONF": "a:1"}
    given = {**told, "CUDA_VISIBLE_DEVICES": "1"}
    for one in seen(hosts.run(*NETWORK, script=WHERE, environ=given)):
        assert told.items() <= one["environment"].items(), one["host"]
        visible = "1" if one["host"] == "h1" else None
        assert one["environment"].get("CUDA_VISIBLE_DEVICES") == visible, one["host"]


def test_machines_are_real_ones(hosts):
    """Ranks of a host are one machine: local and machine ranks follow the hosts."""
    script = (
        "import json, asyncddp as bf\n"
        "bf.init()\n"
        "print(json.dumps({'rank': bf.rank(), 'local': [bf.local_rank(), bf.local_size()],\n"
        "                  'machine': [bf.machine_rank(), bf.machine_size()]}))\n"
    )
    ranks = seen(hosts.run(*NETWORK, script=script))
    assert [one["local"] for one in ranks] == [[0, 2], [1, 2], [0, 2], [1, 2]]
    assert [one["machine"] for one in ranks] == [[0, 2], [0, 2], [1, 2], [1, 2]]


def test_hierarchical_neighbor_allreduce_averages_in_machines_and_mixes_between_them(hosts):
    """x = rank: machines hold 0.5 and 2.5, and exponential_two(2) gives both their mean, 1.5."""
    script = (
        "import json, torch, asyncddp as bf, topology\n"
        "bf.init()\n"
        "bf.set_machine_topology(topology.exponential_two(bf.machine_size()))\n"
        "x = torch.full((3,), float(bf.rank()), dtype=torch.float64)\n"
        "y = bf.hierarchical_neighbor_allreduce(x)\n"
        "print(json.dumps({'rank': bf.rank(), 'y': y.tolist()}))\n"
    )
    ranks = seen(hosts.run(*NETWORK, script=script))
    assert len(ranks) == 4
    for one in ranks:
        assert one["y"] == pytest.approx([1.5] * 3, abs=1e-12)


def test_neighbors_on_other_hosts_are_mixed_over_the_transport(hosts):
    """Large enough to be cut into pieces; one_peer_exponential(4) is exact after two steps."""
    script = (
        "import json, torch, asyncddp as bf, topology\n"
        "bf.init()\n"
        "schedule = topology.one_peer_exponential(bf.size())\n"
        "x = torch.full((300_000,), float(bf.rank()))\n"
        "for step in range(2):\n"
        "    mine = schedule.neighbors(bf.rank(), step)\n"
        "    x = bf.neighbor_allreduce(x, self_weight=mine.self_weight,\n"
        "        src_weights=dict(mine.src_weights), dst_weights=list(mine.dst_ranks))\n"
        "print(json.dumps({'rank': bf.rank(), 'range': [x.min().item(), x.max().item()]}))\n"
    )
    for one in seen(hosts.run(*NETWORK, script=script)):
        assert one["range"] == pytest.approx([1.5, 1.5], abs=1e-6)


def wait_for_ranks(child, count=4):
    for _ in range(count):
        line = child.stdout.readline()
        assert line.startswith("ready"), line + child.stderr.read()


def test_ctrl_c_ends_everything_on_both_hosts(hosts):
    """SIGINT ends the command with 130, and no process is left on either host."""
    child = hosts.start(*NETWORK, script=WAITING.format(victim=None), warm=False)
    wait_for_ranks(child)
    assert len(hosts.processes()) >= 7, "the command, its launcher, a daemon and four ranks"
    (command,) = (p for p in hosts.processes() if p.cmdline()[1:4] == ["-m", "asyncddp", "run"])
    command.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, stderr = child.communicate(timeout=SOON)
    assert child.returncode == 130, stderr
    assert time.monotonic() - start < SOON
    assert hosts.wait_until_gone(10) == []


@pytest.mark.parametrize(("victim", "host"), [(1, "h1"), (3, "h2")])
def test_a_killed_rank_ends_everything_on_both_hosts_and_is_named(hosts, victim, host):
    """A peer may see its connection close before Open MPI sees that it died, and is then named."""
    child = hosts.start(*NETWORK, script=WAITING.format(victim=victim))
    wait_for_ranks(child)
    start = time.monotonic()
    _, stderr = child.communicate(timeout=SOON)
    (said,) = re.findall("asyncddp run: (rank .*)", stderr)
    if "ended by MPI itself" not in said and "was lost first" not in said:
        assert child.returncode == 137, stderr
        assert said == f"rank {victim} on {host} was killed by signal 9 (SIGKILL)"
    assert child.returncode > 0
    assert victim == 3 or said.startswith(f"rank {victim} "), "on the command's own host it is sure"
    assert time.monotonic() - start < SOON
    assert hosts.wait_until_gone(10) == []


def test_a_rank_that_fails_on_another_host_is_named_with_its_reason(hosts):
    """An exception on another host gives exit code 1 and a single traceback."""
    script = (
        "import torch, asyncddp as bf\n"
        "bf.init()\n"
        "if bf.rank() == 2: raise ValueError('loss is nan')\n"
        "bf.allreduce(torch.ones(3))\n"
    )
    code, _, stderr = hosts.run(*NETWORK, script=script)
    assert code == 1
    assert stderr.count("Traceback (most recent call last)") == 1
    assert "rank 2 on h2 failed (exit code 1): ValueError: loss is nan" in stderr
    assert hosts.wait_until_gone(10) == []


def test_ranks_end_when_their_host_is_lost(hosts):
    """The daemon of h2 is killed, as by a crash of that machine."""
    child = hosts.start(*NETWORK, script=WAITING.format(victim=None), warm=False)
    wait_for_ranks(child)
    daemons = [p for p in hosts.processes() if p.name() == "prted"]
    if not daemons:
        pytest.skip("this launcher has no daemon called prted; Open MPI 5 has")
    for daemon in daemons:
        daemon.kill()
    _, stderr = child.communicate(timeout=SOON)
    assert child.returncode != 0, stderr
    assert "asyncddp run: host h2 was lost" in stderr
    assert hosts.wait_until_gone(10) == []


def test_nothing_is_left_of_an_ordinary_run(hosts):
    """When the command has ended with 0, no process is left on either host."""
    assert hosts.run(*NETWORK, script="print(1)")[0] == 0
    assert hosts.wait_until_gone(5) == [], [p.cmdline() for p in psutil.process_iter()]
