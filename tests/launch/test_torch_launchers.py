"""Ranks that are started without MPI: by torchrun, by hand, and by the library's own launcher."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess

import pytest

from asyncddp.errors import ArgumentError
from asyncddp.launch.job_builder import build_job
from asyncddp.launch.job_options import RunOptions
from asyncddp.launch.launchers.local import LOCAL
from tests.support import BEFORE_DEADLINE, RUN_LIMIT
from tests.support.processes import environment, run_to_end, warm_server

pytestmark = pytest.mark.launches

TRAIN = """
import json, sys, torch
import asyncddp as bf
bf.init(timeout=90)
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
optimizer = bf.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, algorithm="decentralized"
)
numbers = torch.Generator().manual_seed(100 + bf.rank())
losses = []
for step in range(12):
    x = torch.randn(16, 20, generator=numbers)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    everywhere = bf.allreduce(loss.detach()).item()
line = {
    "rank": bf.rank(), "size": bf.size(), "local_rank": bf.local_rank(), "losses": losses,
    "mean": everywhere, "transport": bf.current().transport.name, "mpi": "mpi4py" in sys.modules,
    "shares_memory": bf.current().transport.shared_memory_group is not None,
}
sys.stdout.write(json.dumps(line) + chr(10))
bf.shutdown()
"""
BESIDE = """
import torch, torch.distributed as dist
import asyncddp as bf
if {first}: dist.init_process_group("gloo")
bf.init(timeout=60)
if not {first}: dist.init_process_group("gloo")
assert (bf.rank(), bf.size()) == (dist.get_rank(), dist.get_world_size())
assert bf.current().transport.name == "c10d"
ours, theirs = torch.full((50000,), float(bf.rank())), torch.full((3,), 1.0)
handle = bf.allreduce_nonblocking(ours, average=False)
dist.all_reduce(theirs)
assert theirs.tolist() == [2.0] * 3 and handle.wait()[0] == 1.0
dist.destroy_process_group()
assert bf.neighbor_allreduce(ours)[0] == 0.5
bf.shutdown()
bf.init(timeout=60)
assert bf.allreduce(torch.ones(2), average=False).tolist() == [2.0, 2.0]
"""
DIES = """
import os, signal, asyncddp as bf, torch
bf.init(timeout=60)
bf.barrier()
if bf.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
bf.{verb}(torch.ones(5))
"""


LEFT_OUT = """
import os, signal, time, torch, topology
import asyncddp as bf
bf.init(timeout=60)
rank = bf.rank()
bf.set_topology(topology.complete(3))
x = torch.full((4,), float(rank), dtype=torch.float64)
for name in ("average", "sum", "gossip"):
    bf.win_create(x.clone(), name, zero_init=True)
methods = {}
for method in ("win_put", "pull_get", "async_model_average"):
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 0.0)
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = bf.DistributedOptimizer(
        plain, model, method, topology=topology.complete(3), max_staleness=BOUND
    )
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    methods[method] = model, optimizer
bf.barrier()
if rank == 1:
    for _ in range(3):  # further than the others, who leave it out all the same
        for model, optimizer in methods.values():
            torch.nn.init.constant_(model.weight, 1e6)
            optimizer.step()
    for name in ("average", "gossip"):
        bf.win_put(x + 1e6, name)
    bf.win_accumulate(x + 1e6, "sum")
bf.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
context = bf.current()
while not context.engine.lost_peers.is_lost(1):
    time.sleep(0.01)
given = bf.win_update("average")[0].item(), bf.win_update("gossip", 0.5, {1: 0.5})[0].item()
assert max(abs(given[0] - rank * 2 / 3), abs(given[1] - rank)) < 1e-9, given
once = bf.win_update_then_collect("sum")[0].item()
assert once == rank + 1e6 + 1, once  # what was given before is there, once
assert bf.win_update_then_collect("sum")[0].item() == once
assert bf.win_update("sum", 1.0, {1: 1.0})[0].item() == once
for method, (model, optimizer) in methods.items():
    for _ in range(5):
        optimizer.step()
        told = method, optimizer.departed, model.weight.item()
        assert 1 in told[1] and told[2] == 0.0, told
os._exit(0)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def announced(rank, size, port, **more):
    """What a launcher without agents sets, such as the operator of Kubernetes."""
    world = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    told = {name: str(value) for name, value in world.items()}
    return {**told, "MASTER_ADDR": "localhost", **more}


@contextlib.contextmanager
def started(tmp_path, script, *environments):
    """Processes of a script, each with its own variables."""
    path = tmp_path / "script.py"
    path.write_text(script)
    processes = [
        subprocess.Popen(
            [warm_server().python, str(path)],
            env=environment(given),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for given in environments
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(processes):
    """The exit codes and the errors of processes, in their order."""
    told = [process.communicate(timeout=RUN_LIMIT) for process in processes]
    return [process.returncode for process in processes], [error for _, error in told]


def trained(finished):
    assert finished.code == 0, finished.stderr
    lines = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def test_torchrun_trains_what_asyncddp_run_trains(tmp_path):
    """Four ranks of torchrun join one world, without MPI, and train what they train with MPI."""
    script, python = tmp_path / "train.py", warm_server().python
    script.write_text(TRAIN)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=4", "--no-python"]
    alone = trained(run_to_end([python, *torchrun, python, str(script)]))
    command = [python, "-m", "asyncddp", "run", "-np", "4", python, str(script)]
    with_mpi = trained(run_to_end(command))
    assert (
        [line["rank"] for line in alone] == [line["local_rank"] for line in alone] == [0, 1, 2, 3]
    )
    for one, other in zip(alone, with_mpi, strict=True):
        assert (one["size"], one["transport"], one["mpi"]) == (4, "c10d", False)
        assert one["shares_memory"]
        assert other["transport"] == "shared_memory"
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-6)
        assert one["mean"] == pytest.approx(other["mean"], rel=1e-6)


@pytest.mark.parametrize("first", [True, False])
def test_process_groups_of_the_user_stay_free(tmp_path, first):
    """Before and after init(), in a world without elastic agents, both libraries' verbs run."""
    port = free_port()
    worlds = [announced(rank, 2, port, ACCELERATE_MIXED_PRECISION="no") for rank in range(2)]
    with started(tmp_path, BESIDE.format(first=first), *worlds) as processes:
        codes, errors = ended(processes)
    assert codes == [0, 0], errors


@pytest.mark.parametrize("verb", ["allreduce", "neighbor_allreduce"])
def test_a_dead_peer_is_named_at_once(tmp_path, verb):
    """A killed process is an error on all others, which names its rank, long before a deadline."""
    port = free_port()
    worlds = [announced(rank, 3, port) for rank in range(3)]
    with started(tmp_path, DIES.format(verb=verb), *worlds) as processes:
        codes, errors = ended(processes)
    assert codes == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        assert "PeerLeftError" in errors[rank], errors
        assert "rank 1 has left (its process has ended without shutdown())" in errors[rank]


@pytest.mark.parametrize("bound", [None, 4])
def test_what_a_killed_rank_put_last_is_left_out_at_once(tmp_path, bound):
    """Averages give its weight to the own tensor, sums collect what it gave once."""
    port = free_port()
    worlds = [announced(rank, 3, port) for rank in range(3)]
    with started(tmp_path, LEFT_OUT.replace("BOUND", str(bound)), *worlds) as processes:
        codes, errors = ended(processes)
    assert codes == [0, -signal.SIGKILL, 0], errors


@pytest.mark.parametrize(
    ("rank", "words"), [(0, "missing: rank 1"), (1, "missing: rank 0, which serves the store at")]
)
def test_a_rank_that_never_comes_is_named(tmp_path, rank, words):
    """At the deadline of init() the error says who is missing, also where it is the store's."""
    world = announced(rank, 2, free_port(), ASYNCDDP_TIMEOUT="1.5")
    with started(tmp_path, "import asyncddp; asyncddp.init()", world) as processes:
        (code,), (error,) = ended(processes)
    assert code == 1
    assert f"WaitTimeoutError: rank {rank}: init() was not done in 1." in error
    assert words in error


def test_different_settings_are_found_at_init(tmp_path):
    """All ranks name the setting, both values and both ranks."""
    port = free_port()
    worlds = [announced(rank, 2, port, ASYNCDDP_CHECK=str(rank)) for rank in range(2)]
    with started(tmp_path, "import asyncddp; asyncddp.init()", *worlds) as processes:
        codes, errors = ended(processes)
    assert codes == [1, 1]
    for error in errors:
        assert "ASYNCDDP_CHECK is False on rank 0 and True on rank 1" in error, error


def test_different_secrets_are_found_at_init(tmp_path):
    """What one rank has written another does not believe; no secret is shown."""
    port = free_port()
    worlds = [announced(rank, 2, port, ASYNCDDP_SECRET=f"hidden{rank}") for rank in range(2)]
    with started(tmp_path, "import asyncddp; asyncddp.init()", *worlds) as processes:
        codes, errors = ended(processes)
    assert codes == [1, 1]
    assert "EnvironmentProblem: init(): what the store at localhost:" in errors[0], errors
    assert "set it alike for all ranks" in errors[0]
    assert "hidden" not in "".join(errors)


ELSEWHERE = """
import asyncddp as bf, torch
from asyncddp.transport.sockets import world_records
told = world_records.describe_machine()
world_records.describe_machine = lambda: f"{told} {RANK}"
bf.init(timeout=30)
assert bf.allreduce(torch.ones(2), average=False).tolist() == [2.0, 2.0]
assert bf.current().transport.shared_memory_group is None
"""


@pytest.mark.parametrize("secret", [False, True])
def test_nobody_is_taken_for_a_rank_of_elsewhere_without_a_secret(tmp_path, secret):
    """Where all ranks are on this machine, TCP is for those that know a secret."""
    port, given = free_port(), {"ASYNCDDP_SECRET": "a" * 64} if secret else {}
    worlds = [announced(rank, 2, port, **given) for rank in range(2)]
    script = "import os\nRANK = os.environ['RANK']\n" + ELSEWHERE
    with started(tmp_path, script, *worlds) as processes:
        codes, errors = ended(processes)
    assert codes == ([0, 0] if secret else [1, 1]), errors
    for rank, error in enumerate(errors if not secret else ()):
        words = f"rank {rank}: init(): rank {1 - rank} cannot be reached by Unix sockets, though"
        assert words in error, error


def test_asyncddp_run_gives_the_ranks_a_secret(tmp_path):
    """One for all ranks of a run, and not the user's, which may be an old one."""
    script = tmp_path / "show.py"
    script.write_text("import os; print('secret', os.environ['ASYNCDDP_SECRET'])")
    python = warm_server().python
    command = [python, "-m", "asyncddp", "run", "--launcher", "local", "-np", "2", str(script)]
    finished = run_to_end(command, environ={"ASYNCDDP_SECRET": "old"})
    shown = re.findall(r"secret (\w+)", finished.stdout)
    assert len(shown) == 2, finished
    assert len(shown[0]) == 64
    assert shown[0] == shown[1]


def test_a_port_that_is_taken_is_an_error_that_says_so(tmp_path):
    """Rank 0 cannot serve the store where another program listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        world = announced(0, 2, taken.getsockname()[1], ASYNCDDP_TIMEOUT="5")
        with started(tmp_path, "import asyncddp; asyncddp.init()", world) as processes:
            (code,), (error,) = ended(processes)
    assert code == 1
    assert "cannot serve the store at MASTER_ADDR=localhost" in error
    assert "Set MASTER_PORT to a free port" in error


# asyncddp run without MPI


def test_without_mpi_asyncddp_run_starts_the_ranks_itself(tmp_path):
    """Ranks that cannot import mpi4py train."""
    script = tmp_path / "train.py"
    no_mpi = 'import sys; sys.modules["mpi4py"] = None\n'
    script.write_text(f"{no_mpi}{TRAIN}")
    python = warm_server().python
    run = [python, "-m", "asyncddp", "run", "--launcher", "local", "-np", "2"]
    lines = trained(run_to_end([*run, python, str(script)]))
    assert [(line["rank"], line["transport"]) for line in lines] == [(0, "c10d"), (1, "c10d")]


@pytest.mark.parametrize(
    ("last", "code", "words"),
    [
        ("raise ValueError('no such thing')", 1, "rank 1 on .* failed .*ValueError: no such thing"),
        ("os.kill(os.getpid(), 9)", 137, r"rank 1 was killed by signal 9 \(SIGKILL\)"),
    ],
)
def test_the_rank_that_failed_first_is_named(run, last, code, words):
    """The diagnosis of a run is the same as under mpirun."""
    text = f"import os\nif os.environ['RANK'] == '1': {last}\nimport time; time.sleep(60)"
    finished = run("--launcher", "local", "-np", "3", run.script(text))
    assert finished.code == code
    assert finished.seconds < BEFORE_DEADLINE
    assert re.search(words, finished.stderr), finished.stderr


def test_lines_of_output_can_be_tagged(run):
    """--tag-output puts the rank in front of every line."""
    text = "import os; print('hello from', os.environ['RANK'], os.environ['LOCAL_WORLD_SIZE'])"
    finished = run("--launcher", "local", "--tag-output", "-np", "2", run.script(text))
    assert sorted(finished.stdout.splitlines()) == ["[0] hello from 0 2", "[1] hello from 1 2"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": "elsewhere:2"}, "on this machine alone.*torchrun --nnodes"),
        ({"bind_to": "core"}, "--bind-to core: .* has no such option"),
        ({"mpi_args": ("--x y",)}, "--mpi-args --x y: .* has no such option"),
    ],
)
def test_what_it_cannot_do_is_refused(options, words):
    """Options of MPI's launchers are errors that say what to do."""
    job = build_job(RunOptions(num_proc=2, **options), ["true"], dict(os.environ))
    with pytest.raises(ArgumentError, match=words):
        LOCAL.build_command("python", job)
