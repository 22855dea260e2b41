"""How runs under ``mpirun`` end when a rank fails: soon, non-zero, with the reason, alone."""

from __future__ import annotations

import re
import textwrap

import pytest

from tests.support import run_on_mpirun

HEAD = """
import os, signal, sys, time
from pathlib import Path
import torch
import asyncddp as bf

def failing():
    Path(__file__).with_name("failed").write_text(str(time.time()))

bf.init()
x = bf.neighbor_allreduce(torch.ones(4))
"""
ON_AND_ON = """
while True:
    x = bf.neighbor_allreduce(x)
"""


def run_failing(folder, body, ranks, warm=True, **environ):
    """Run a script in which a rank calls ``failing()``; no deadline may pass."""
    script = HEAD + textwrap.dedent(body) + ON_AND_ON
    done = run_on_mpirun(ranks, script, folder, environ=environ, warm=warm)
    assert not done.timed_out, done
    assert done.code != 0, done
    assert done.left == (), done
    failed = float((folder / "failed").read_text())
    assert done.ended - failed < 60, done
    return done


@pytest.mark.mpi(4)
def test_a_rank_that_raises(tmp_path):
    """Its rank, error and traceback come first; nobody else prints one."""
    body = """
    def train():
        raise ValueError("the data is gone")
    if bf.rank() == 1:
        failing()
        train()
    """
    done = run_failing(tmp_path, body, 4)
    assert done.code == 1, done
    told = [line for line in done.stderr.splitlines() if line]
    assert told[0] == "[asyncddp] rank 1 of 4 failed: ValueError: the data is gone", done
    assert told[1] == "Traceback (most recent call last):"
    assert "in train" in done.stderr
    assert done.stderr.count("Traceback") == 1, done


@pytest.mark.mpi(4)
def test_a_rank_that_is_killed(tmp_path):
    """The launcher names it, and no rank prints a traceback."""
    body = """
    if bf.rank() == 1:
        failing()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = run_failing(tmp_path, body, 4)
    assert re.search(r"process rank 1 .*exited on\s+signal 9", done.stderr, re.S), done
    assert "Traceback" not in done.stderr, done


@pytest.mark.mpi(2)
@pytest.mark.parametrize("verb", ["allreduce", "allgather", "broadcast"])
def test_a_rank_that_is_killed_in_a_collective_of_a_large_tensor(tmp_path, verb):
    """Whatever the others read of its memory, they end."""
    body = f"""
    import threading
    large = torch.ones(20_000_000)
    call = (lambda: bf.broadcast(large, 1)) if {verb!r} == "broadcast" else lambda: bf.{verb}(large)
    call()
    def die():
        time.sleep(0.2)
        failing()
        os.kill(os.getpid(), signal.SIGKILL)
    if bf.rank() == 1:
        threading.Thread(target=die).start()
    while True:
        call()
    """
    run_failing(tmp_path, body, 2)


@pytest.mark.mpi(2)
def test_a_rank_that_exits_with_a_code(tmp_path):
    """The others say that they needed it."""
    body = """
    if bf.rank() == 1:
        failing()
        sys.exit(3)
    """
    done = run_failing(tmp_path, body, 2)
    told = "rank 1 has left (its script has ended), but is needed"
    assert told in done.stderr, done
    assert "Traceback" not in done.stderr, done


@pytest.mark.mpi(4)
def test_ranks_that_do_not_fit_together(tmp_path):
    """One of them speaks, with one traceback; the message names both."""
    body = """
    failing()
    bf.neighbor_allreduce(torch.ones(5 if bf.rank() == 1 else 4), name="layer")
    """
    done = run_failing(tmp_path, body, 4, warm=False)
    first = done.stderr.lstrip().splitlines()[0]
    assert re.match(r"\[asyncddp\] rank \d of 4 failed: MismatchError: rank \d, ", first), done
    assert re.search(r"expected shape \([45],\), got \([45],\)", first), done
    assert "neighbor_allreduce 'layer' (use 0)" in first
    assert done.stderr.count("Traceback") == 1, done


@pytest.mark.mpi(2)
def test_a_rank_that_sleeps_past_the_deadline(tmp_path):
    """First a warning with the rank, verb and name, once; then the error with the same."""
    body = """
    if bf.rank() == 1:
        time.sleep(60)
    failing()
    bf.neighbor_allreduce(x, name="layer")
    """
    done = run_failing(tmp_path, body, 2, ASYNCDDP_TIMEOUT="2", ASYNCDDP_WARN_AFTER="1")
    called = "rank 0: neighbor_allreduce 'layer' (use 0)"
    warning = re.escape(f"{called} has been waiting for ") + r"\d+ s; missing: rank 1"
    (warned,) = re.finditer(warning, done.stderr)
    error = re.escape(f"failed: WaitTimeoutError: {called} was not done in ")
    found = re.search(error + r"[\d.]+ s \(ASYNCDDP_TIMEOUT=2\); missing: rank 1", done.stderr)
    assert found, done
    assert warned.start() < found.start()
    assert done.stderr.count("Traceback") == 1


@pytest.mark.mpi(2)
def test_a_script_that_ends_with_verbs_under_way_and_mismatches_unsaid(tmp_path):
    """Ending a script tells what nobody had asked for, and the run fails."""
    body = """
    over = Path(__file__).with_name("over")
    alone = {"self_weight": 1.0, "src_weights": {}, "dst_weights": []}
    if bf.rank() == 0:
        bf.neighbor_allreduce(x, **{**alone, "dst_weights": [1]}, name="d")
        bf.neighbor_allreduce(x, **{**alone, "dst_weights": [1]}, name="d")
        while not over.exists():
            time.sleep(0.01)
        bf.neighbor_allreduce(x, **{**alone, "dst_weights": [1]}, name="d")
        while bf.current().engine.matcher.channels.late_error is None:
            time.sleep(0.01)
        failing()
        raise SystemExit
    bf.neighbor_allreduce(x, **{**alone, "src_weights": {0: 1.0}}, name="d")
    bf.neighbor_allreduce(x, **{**alone, "src_weights": {0: 1.0}}, name="d")
    bf.neighbor_allreduce(x, **alone, name="d")
    over.touch()
    while bf.current().engine.matcher.channels.late_error is None:
        time.sleep(0.01)
    raise SystemExit
    """
    done = run_failing(tmp_path, body, 2)
    assert "MismatchError" in done.stderr, done
    assert "rank 1 expected nothing from rank 0 in neighbor_allreduce 'd' (use 2)" in done.stderr


@pytest.mark.mpi(2)
def test_a_run_that_ends_well_prints_nothing(tmp_path):
    """The counter-check, with verbs that nobody waited for and without ``shutdown()``."""
    script = HEAD + textwrap.dedent("""
    handle = bf.allreduce_nonblocking(x)
    late = bf.neighbor_allreduce_nonblocking(x, name="late")
    handle.wait()
    print(f"rank {bf.rank()} sum {x.sum().item()}\\n", end="", flush=True)
    """)
    done = run_on_mpirun(2, script, tmp_path)
    assert done.code == 0, done
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 sum 4.0", "rank 1 sum 4.0"]
    assert done.stderr == "", done
    assert done.left == ()


SURVIVORS = """
import os, signal, time, torch
from pathlib import Path
import asyncddp as bf
from asyncddp import topology
bf.init(timeout=100)
rank = bf.rank()
bf.set_topology(topology.ring(4))
x = torch.full((70_000,), float(rank))
bf.neighbor_allreduce(x)
bf.win_create(x.clone(), "w")
bf.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
begun, near = time.monotonic(), {0: [3], 2: [3], 3: [0, 2]}[rank]
weights = {peer: 0.25 for peer in near}
row = {"self_weight": 1 - 0.25 * len(near), "src_weights": weights}
for _ in range(200):
    mixed = bf.neighbor_allreduce(x, name="go on", **row, dst_weights=dict.fromkeys(near, 1.0))
    assert abs(mixed[0].item() - (1 - 0.25 * len(near)) * rank - 0.25 * sum(near)) < 1e-5
try:
    bf.neighbor_allreduce(x, name="all")
except bf.PeerLeftError as error:
    while not bf.current().engine.lost_peers.is_lost(1):  # another rank may have told first
        time.sleep(0.01)
    assert rank or bf.win_update("w", 0.5, {1: 0.5})[0] == 0.0, "rank 1 is left out"
    print(f"rank {rank} in time: {time.monotonic() - begun < 90}: {error}\\n", end="", flush=True)
(folder := Path(__file__).parent).joinpath(f"told{rank}").touch()
while len(list(folder.glob("told*"))) < 3:  # the launcher ends all after the first
    time.sleep(0.01)
os._exit(0)
"""


@pytest.mark.mpi(4)
@pytest.mark.parametrize("transport", ["mpi", "shared_memory"])
def test_verbs_of_survivors_go_on_where_mpi_lets_them_live(tmp_path, transport):
    """Under ULFM messages of the others come again, and the dead rank is named at once."""
    done = run_on_mpirun(
        4,
        SURVIVORS,
        tmp_path,
        options=["--with-ft", "ulfm"],
        environ={"ASYNCDDP_TRANSPORT": transport},
    )
    assert not done.timed_out, done
    told = re.findall(
        r"rank (\d) in time: True: .*rank 1 has left \(MPI reports that its process has failed",
        done.stdout,
    )
    assert {"0", "2"} <= set(told), done  # rank 3 has other neighbours
