"""A run on one machine listens to that machine alone."""

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from asyncddp.launch.job_options import Job
from asyncddp.launch.launcher_discovery import find_launcher
from asyncddp.restrict_listening_sockets import (
    confine,
    inodes,
    listeners,
    local_open_mpi,
)
from tests.support.processes import warm_server
from tests.support.sockets import answers_at_other_addresses, device_of, open_to_others

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are found in /proc")

VERBS = """
import torch
{first}
import asyncddp as bf
bf.init()
x = bf.allreduce(torch.full((100_000,), float(bf.rank())))
bf.neighbor_allreduce(torch.ones(3), name="x")
print(x[0].item(), flush=True)
open({fifo!r}).read()
"""


def can_confine():
    """Whether the system lets a process change a socket of its child; containers may not."""
    with socket.socket() as own:
        own.bind(("0.0.0.0", 0))
        own.listen()
        try:
            device_of(os.getpid(), own.fileno())
            confine(known=inodes() - {os.fstat(own.fileno()).st_ino})
        except OSError:
            return False
    return True


@pytest.fixture
def confining():
    if not can_confine():
        pytest.skip("needs Linux 5.7 or newer, and pidfd_getfd, which a container may forbid")


@pytest.mark.parametrize(
    ("arguments", "variables", "first"),
    [
        ((), {}, "from mpi4py import MPI"),
        (("--network-interface", "lo"), {}, ""),
        ((), {"OMPI_MCA_btl_sm_backing_directory": "/nowhere"}, ""),
    ],
    ids=["MPI first", "lo", "without shared memory"],
)
def test_nobody_else_can_reach_a_run_of_one_machine(run, confining, arguments, variables, first):
    """Neither launcher nor ranks, whoever started MPI, with and without room for shared memory."""
    fifo = run.folder / "end"
    os.mkfifo(fifo)
    text = VERBS.format(first=first, fifo=str(fifo))
    program = [run.script(text)] if first else run.warm(text)
    run.environment.update(variables)
    child = run.start("-np", "2", *arguments, *program)
    answers = [child.stdout.readline(), child.stdout.readline()]
    assert answers == ["0.5\n"] * 2, child.stderr.read() if child.poll() is not None else ""
    found = run.processes()
    assert len(found) >= 4, "the command, its launcher and two ranks"
    assert open_to_others(found) == []
    assert answers_at_other_addresses(found) == []
    fifo.write_text("")
    assert run.finish(child).code == 0


MIXED = """
import os
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    from mpi4py import MPI
import socket, torch
import asyncddp as bf
from asyncddp.restrict_listening_sockets import listeners
def device(one):
    with socket.socket(fileno=os.dup(one.descriptor)) as copy:
        return copy.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
bf.init()
bf.allreduce(torch.ones(100_000))
bf.neighbor_allreduce(torch.ones(100_000))
if bf.rank() == 1:
    print({device(one)[:2] for one in listeners() if not one.is_loopback} <= {b"lo"}, flush=True)
bf.barrier()
"""


def test_ranks_of_a_plain_mpirun_close_their_sockets_though_one_has_started_mpi_before(
    run, confining
):
    """And Open MPI does not complain of ranks that differ."""
    job = Job(2, (sys.executable, run.script(MIXED)), oversubscribe=True, root=os.geteuid() == 0)
    found = find_launcher(None, os.environ)
    command = found.launcher.build_command(found.executable, job)
    environment = {**run.environment, **command.environment}
    done = subprocess.run(
        command.arguments, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "True\n"


def test_networks_stay_open_where_other_machines_may_take_part(run):
    """A batch system has told the launcher of machines, or the user has."""
    script = run.script("")
    (line,) = run("-np", "2", "--dry-run", script).stdout.splitlines()
    assert "OMPI_MCA_btl" in line or "mpirun" not in line, line
    (line,) = run("-np", "2", "--dry-run", "--mpi-args=--hostfile h", script).stdout.splitlines()
    assert "OMPI_MCA_btl" not in line
    (line,) = run("-np", "2", "--dry-run", "--mpi-args=--mca btl tcp", script).stdout.splitlines()
    assert "OMPI_MCA_btl" not in line
    run.environment["PBS_NODEFILE"] = "/var/nodes"
    (line,) = run("-np", "2", "--dry-run", script).stdout.splitlines()
    assert "OMPI_MCA_btl" not in line


def test_ranks_of_one_machine_reach_their_launcher_by_loopback(run):
    """Open MPI's launcher is closed at every other address; what the user has chosen stays."""
    (line,) = run("-np", "2", "--dry-run", run.script("")).stdout.splitlines()
    assert "PMIX_MCA_ptl_base_if_include=127.0.0.0/8" in line or "mpirun" not in line, line
    run.environment["PMIX_MCA_ptl_base_if_exclude"] = "eth1"
    (line,) = run("-np", "2", "--dry-run", run.script("")).stdout.splitlines()
    assert "PMIX_MCA" not in line


@pytest.mark.parametrize("interface", ["lo", "127.0.0.0/8"])
def test_loopback_between_machines_is_refused_in_words(run, interface):
    """``--network-interface`` of the loopback with hosts elsewhere exits with 2, naming them."""
    hosts = ("-H", "localhost:1,elsewhere:2")
    ended = run(*hosts, "--network-interface", interface, run.script(""))
    assert ended.code == 2
    assert f"--network-interface: '{interface}' reaches this machine alone" in ended.stderr
    assert "the ranks run on elsewhere:2. Name an interface" in ended.stderr


def test_sockets_are_found_with_their_addresses():
    """``listeners`` has the address and port of each listening socket, and no others."""
    with socket.socket() as four, socket.socket(socket.AF_INET6) as six, socket.socket() as quiet:
        four.bind(("127.0.0.1", 0))
        six.bind(("::", 0))
        quiet.bind(("127.0.0.1", 0))
        four.listen()
        six.listen()
        found = {one.descriptor: one for one in listeners()}
        assert str(found[four.fileno()].address) == "127.0.0.1"
        assert found[four.fileno()].port == four.getsockname()[1]
        assert found[four.fileno()].is_loopback
        assert str(found[six.fileno()].address) == "::"
        assert not found[six.fileno()].is_loopback
        assert quiet.fileno() not in found


def test_only_new_sockets_that_others_could_reach_are_confined(confining):
    """What the user's program listens on already is not touched, nor what is on loopback."""
    with socket.socket() as before, socket.socket() as after, socket.socket() as local:
        before.bind(("", 0))
        before.listen()
        known = inodes()
        after.bind(("", 0))
        after.listen()
        local.bind(("127.0.0.1", 0))
        local.listen()
        assert confine(known=known) == {os.fstat(after.fileno()).st_ino}
        devices = [device_of(os.getpid(), one.fileno()) for one in (before, after, local)]
        assert devices == [b"", b"lo", b""]
        socket.create_connection(("127.0.0.1", after.getsockname()[1]), timeout=5).close()


@pytest.mark.parametrize("name", ["btl", "btl_tcp_if_include", "btl_tcp_if_exclude"])
def test_networks_that_the_user_has_chosen_stay(name):
    """If the user has set a network parameter of Open MPI, no parameter is added."""
    assert local_open_mpi(2, {f"OMPI_MCA_{name}": "x"}, all_told=True) == {}


def test_the_choice_to_leave_out_libfabric_is_the_librarys_own():
    """It stands in the environment of ranks which the launcher may have put on other machines."""
    assert local_open_mpi(2, {"OMPI_MCA_btl": "^ofi"}, all_told=True).keys() >= {"OMPI_MCA_btl"}


def test_what_init_tells_mpi_is_not_told_to_programs_that_follow(run):
    """``init()`` leaves no choice of networks in the environment, which the next run would keep."""
    text = "import os, asyncddp as bf; bf.init(); print(sorted(os.environ))"
    done = subprocess.run(
        [warm_server().python, "-c", text],
        env=run.environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "OMPI_MCA_pml_ob1_send_pipeline_depth" in done.stdout, "which holds on any network"
    assert "OMPI_MCA_btl'" not in done.stdout
    assert "OMPI_MCA_btl_tcp_if_include" not in done.stdout


def test_tcp_is_left_out_only_where_shared_memory_has_room(monkeypatch):
    """TCP is excluded if shared memory has room and all are told; without room it is local."""
    loopback = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_btl_tcp_if_include": "127.0.0.0/8"}
    for room, all_told, found in (
        (1 << 40, True, {"OMPI_MCA_btl": "^ofi,tcp"}),
        (1 << 40, False, {"OMPI_MCA_btl": "^ofi"}),
        (1 << 20, True, loopback),
        (1 << 20, False, loopback),
    ):
        usage = SimpleNamespace(free=room)
        monkeypatch.setattr("shutil.disk_usage", lambda folder, usage=usage: usage)
        assert local_open_mpi(2, {}, all_told=all_told) == found


def test_a_process_that_has_ended_is_an_error_of_the_system():
    """``confine`` of a process that has ended raises ``OSError``."""
    child = psutil.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(OSError, match="No such"):
        confine(child.pid)
