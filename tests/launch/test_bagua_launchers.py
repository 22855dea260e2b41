"""Bagua's launchers: ``asyncddp run`` with Bagua's options, and words for those without effect."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from asyncddp.integrations.bagua import baguarun, launch
from tests.support import RUN_LIMIT

LAUNCH = ("asyncddp.integrations.bagua.launch",)
BAGUARUN = ("asyncddp.integrations.bagua.baguarun",)
SHOW = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR",
         "MASTER_PORT", "LR")
print(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}]), flush=True)
"""


def invoke(command, *arguments, **environment):
    return CliRunner().invoke(command.main, arguments, env=environment)


def dry(command, *arguments, **environment):
    """The words of the command that would start the ranks."""
    ended = invoke(command, "--dry_run", *arguments, **environment)
    assert ended.exit_code == 0, ended.output
    return shlex.split(ended.stdout)


def value_after(words, *names):
    return next(words[words.index(name) + 1] for name in names if name in words)


# real runs


@pytest.mark.launches
@pytest.mark.parametrize("command", [LAUNCH, (*BAGUARUN, "--host_list", "localhost:22")])
def test_ranks_find_what_bagua_scripts_read(run, command):
    """Script, arguments and the variables of each rank are as Bagua's launchers give them."""
    run.command = command[:1]
    options = ("--nproc_per_node=2", "--master_port=28123", run.script(SHOW), "--lr", "0.1")
    ended = run(*command[1:], *options)
    assert ended.code == 0, ended.stderr
    assert ended.stderr == ""
    found = sorted((json.loads(line) for line in ended.stdout.splitlines()), key=str)
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "LR": None}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "28123"}
    for rank, (arguments, variables) in enumerate(found):
        assert arguments == ["--lr", "0.1"]
        assert variables == {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}


@pytest.mark.launches
def test_a_failing_rank_ends_the_run_with_its_exit_code(run):
    """The other ranks are ended, and the last words are those of ``asyncddp run``."""
    run.command = LAUNCH
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(300)\n"
    ended = run("--nproc_per_node", "2", "--autotune_warmup_time", "1", run.script(script))
    assert ended.code == 7
    assert "asyncddp run: rank 1 on " in ended.stderr
    assert run.wait_until_gone(20) == []
    warnings = [line for line in ended.stderr.splitlines() if "without effect" in line]
    assert warnings == [
        "asyncddp.integrations.bagua.launch: without effect here: --autotune_warmup_time: "
        "asyncddp.Autotune has such settings for DistributedOptimizer(autotune=...)."
    ]


@pytest.mark.launches
def test_ctrl_c_ends_all_ranks(run):
    """SIGINT to the launcher: it ends with 130, and no rank is left."""
    run.command = BAGUARUN
    script = run.script("import time\nprint('ready', flush=True)\ntime.sleep(300)\n")
    child = run.start("--host_list", "localhost", "--nproc_per_node", "2", script)
    assert child.stdout.readline() == child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    assert run.finish(child).code == 130
    assert run.wait_until_gone(20) == []


SCRIPT = """
import sys
import torch
import asyncddp as bf
import asyncddp.integrations.bagua.torch_api as bagua
from asyncddp.integrations.bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint
from asyncddp.integrations.bagua.torch_api.contrib import LoadBalancingDistributedSampler
from asyncddp.integrations.bagua.torch_api.contrib import fuse_optimizer

before = bagua.get_rank(), bagua.get_world_size(), bagua.get_local_rank(), bagua.get_node_rank()
bagua.init_process_group()
assert before == (bf.rank(), bf.size(), bf.local_rank(), bf.machine_rank())
sampler = LoadBalancingDistributedSampler(range(6), complexity_fn=lambda x: x, shuffle=False)
model = torch.nn.Linear(1, 1)
optimizer = fuse_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
start = load_checkpoint(sys.argv[1], model, optimizer)
for step in range(start, start + 2):
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.fuse_step()
    save_checkpoint(step + 1, sys.argv[1], model, optimizer, per_rank=True)
print(before, list(sampler), start, flush=True)
"""


@pytest.mark.launches
def test_a_script_with_other_import_lines(run):
    """Two runs of a script in Bagua's words: the second goes on where the first has saved."""
    run.command = LAUNCH
    script = run.warm(SCRIPT)
    for start in (0, 2):
        ended = run("--nproc_per_node=2", *script, str(run.folder / "saved"))
        assert ended.code == 0, ended.stderr
        wanted = [f"({rank}, 2, {rank}, 0) {[rank, 2 + rank, 4 + rank]} {start}" for rank in (0, 1)]
        assert sorted(ended.stdout.splitlines()) == wanted


@pytest.mark.launches
@pytest.mark.parametrize(("rank", "node"), [(0, "0"), (1, "0"), (2, "1"), (5, "2")])
def test_the_number_of_the_node(rank, node, tmp_path):
    """NODE_RANK follows from the rank and the ranks of each node, unless it is set."""
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ.get('NODE_RANK'))\n")

    def printed(**variables):
        done = subprocess.run(
            [sys.executable, "-m", "asyncddp.launch.rank", str(script)],
            env={**os.environ, "PMI_RANK": str(rank), **variables},
            stdout=subprocess.PIPE,
            text=True,
            timeout=RUN_LIMIT,
            check=True,
        )
        return done.stdout.strip()

    assert printed(ASYNCDDP_RANKS_PER_NODE="2") == node
    assert printed(ASYNCDDP_RANKS_PER_NODE="2", NODE_RANK="9") == "9"
    assert printed() == "None"


def test_they_start_without_what_is_slow_to_import():
    """``--help`` imports neither torch nor MPI."""
    for (module,) in (LAUNCH, BAGUARUN):
        code = (
            f"import sys, {module} as it\n"
            "try: it.main(['--help'])\n"
            "except SystemExit as end: assert end.code == 0\n"
            "print(*sorted(sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        modules = set(done.stdout.splitlines()[-1].split())
        assert module in modules
        assert not {"torch", "mpi4py", "numpy", "networkx", "rich"} & modules


# what is started


@pytest.mark.usefixtures("run")
def test_hosts_become_slots():
    """Each host gets ``nproc_per_node`` slots; the port of ssh and the variables go along."""
    words = dry(
        baguarun,
        *("--host_list", "h1:2222,h2:2222", "--nproc_per_node=4", "--master_port=29500"),
        *("-x", "LR=0.1", "train.py", "--nproc_per_node", "9"),
    )
    assert value_after(words, "-np", "-n") == "8"
    assert "h1:4,h2:4" in words
    assert re.search(r"-p 2222\b", " ".join(words))
    assert words[-3:] == ["train.py", "--nproc_per_node", "9"]
    forwarded = " ".join(words)
    for variable in ("LR", "MASTER_PORT", "MASTER_ADDR", "ASYNCDDP_RANKS_PER_NODE"):
        assert variable in forwarded
    assert {"LR=0.1", "MASTER_PORT=29500", "MASTER_ADDR=h1", "ASYNCDDP_RANKS_PER_NODE=4"} <= set(
        words
    )


@pytest.mark.usefixtures("run")
def test_hosts_of_the_environment():
    """``BAGUA_NODE_DOMAIN_NAMES`` and ``BAGUA_SSH_PORT`` stand for options that are not given."""
    variables = {"BAGUA_NODE_DOMAIN_NAMES": "h1,h2", "BAGUA_SSH_PORT": "2022"}
    words = dry(baguarun, "train.py", **variables)
    assert "h1:1,h2:1" in words
    assert re.search(r"-p 2022\b", " ".join(words))
    words = dry(baguarun, "--ssh_port", "23", "--host_list", "h3", "train.py", **variables)
    assert "h3:1" in words
    assert re.search(r"-p 23\b", " ".join(words))


@pytest.mark.usefixtures("run")
def test_the_master_is_as_asked_for():
    """``--master_addr`` and ``--master_port``; what the user exports comes first."""
    words = dry(launch, "--master_addr=10.0.0.7", "--master_port", "1234", "sh")
    assert {"MASTER_ADDR=10.0.0.7", "MASTER_PORT=1234"} <= set(words)
    words = dry(baguarun, "--host_list=h1", "-x", "MASTER_PORT=7", "--master_port=8", "train.py")
    assert "MASTER_PORT=7" in words
    assert "MASTER_PORT=8" not in words


@pytest.mark.usefixtures("run")
def test_modules_and_programs(tmp_path, monkeypatch):
    """``-m`` runs a module by Python, ``--no_python`` even a script as the program it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert dry(launch, "-m", "this", "x")[-5:] == ["-m", "asyncddp.launch.rank", "-m", "this", "x"]
    assert dry(launch, "train.py", "x")[-4:] == ["-m", "asyncddp.launch.rank", "train.py", "x"]
    words = dry(launch, "--no_python", "./train.py", "x")
    assert words[-3:] == ["env", "./train.py", "x"]
    assert "asyncddp.launch.rank" not in words
    assert dry(launch, "--no_python", "sh", "-c", "ls")[-3:] == ["sh", "-c", "ls"]


@pytest.mark.usefixtures("run")
def test_options_without_effect_are_named_once():
    """One warning has all of them, with what takes their place; none where they ask for nothing."""
    ended = invoke(
        launch,
        *("--bagua_service_port=29501", "--set_additional_flag", "--logdir", "logs"),
        *("--autotune_max_samples=60", "--autotune_warmup_time=30"),
        *("--autotune_sampling_confidence_time=5", "--is_output_autotune_log"),
        *("--report_metrics", "--enable_bagua_net"),
        *("--dry_run", "sh"),
    )
    assert ended.exit_code == 0
    (line,) = ended.stderr.splitlines()
    assert line.startswith("asyncddp.integrations.bagua.launch: without effect here: --bagua_serv")
    for name in (
        "autotune_max_samples, --autotune_sampling",
        "set_additional_flag: scripts read LOCAL_RANK",
        "enable_bagua_net: MPI's",
    ):
        assert f"--{name}" in line
    assert line.count("Autotune has such settings") == 1
    assert invoke(launch, "--dry_run", "sh").stderr == ""


@pytest.mark.usefixtures("run")
def test_options_that_set_variables():
    """Ranks read the level of tuning and the size of buckets, unless ``-x`` gives them."""
    words = dry(launch, "--autotune_level=1", "--default_bucket_size", "1024", "sh")
    assert {"BAGUA_AUTOTUNE=1", "BAGUA_DEFAULT_BUCKET_SIZE=1024"} <= set(words)
    given = ("--host_list=localhost", "-x", "BAGUA_AUTOTUNE=0", "--autotune_level=1")
    words = dry(baguarun, *given, "sh")
    assert "BAGUA_AUTOTUNE=0" in words
    assert "BAGUA_AUTOTUNE=1" not in words


# mistakes


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (launch, ["--nnodes=2", "--node_rank=0", "--nproc_per_node=8", "x.py"],
         "expected one node, got nnodes=2, node_rank=0. Bagua starts a launcher on every node; "
         "here one command starts the ranks of all nodes. Call, on one of them, baguarun "
         "--host_list HOST1,HOST2 --nproc_per_node=8 PROGRAM, or asyncddp run -H HOST1:8,HOST2:8 "
         "PROGRAM"),
        (launch, ["--node_rank=1", "x.py"], "got nnodes=1, node_rank=1"),
        (launch, ["--nproc_per_node=0", "x.py"], "a number of ranks of at least 1, got '0'"),
        (launch, [], "Missing argument 'PROGRAM...'"),
        (launch, ["nowhere.py"], "no such script: 'nowhere.py'"),
        (baguarun, ["x.py"], "--host_list: expected hosts such as h1:22,h2:22, got none, and "
         "BAGUA_NODE_DOMAIN_NAMES is not set"),
        (baguarun, ["--host_list=h1:22,h2:23", "x.py"], "expected one port of ssh for all hosts"),
        (baguarun, ["--host_list=h1:x", "x.py"], "expected hosts such as h1:22,h2:22, got 'h1:x'"),
        (baguarun, ["--host_list=h1,h1", "x.py"], "'h1' is there twice"),
        (baguarun, ["--host_list=h1:99999", "x.py"], "a port number from 1 to 65535, got '99999'"),
    ],
)  # fmt: skip
def test_a_mistake_is_a_sentence(command, arguments, words):
    """Exit code 2, and what was expected and found."""
    ended = invoke(command, *arguments)
    assert ended.exit_code == 2
    assert words in " ".join(ended.output.split())


def test_a_port_in_the_environment_that_is_none():
    """The variable is named."""
    ended = invoke(baguarun, "--host_list=h1", "x.py", BAGUA_SSH_PORT="ssh")
    assert ended.exit_code == 2
    assert "BAGUA_SSH_PORT: expected a port number from 1 to 65535, got 'ssh'" in " ".join(
        ended.output.split()
    )


def test_this_machine_is_the_master_where_it_is_first(run):
    """Ranks on other hosts are told this machine's name."""
    del run
    words = dry(baguarun, "--host_list", f"{socket.gethostname()},h2", "train.py")
    assert f"MASTER_ADDR={socket.gethostname()}" in words
