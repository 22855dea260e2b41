"""Runs whose ranks use windows: a rank that is killed or stopped, the end, what is left."""

from __future__ import annotations

import re
import textwrap

import pytest

from tests.support import RUN_LIMIT, run_on_mpirun

HEAD = """
import gc, os, signal, sys, threading, time
from pathlib import Path
import torch
import asyncddp as bf
from asyncddp import topology
"""
TRANSPORTS = ("shared_memory", "mpi")


def run_on(transport, body, folder, ranks=2, options=(), timeout=RUN_LIMIT, **environ):
    """Run a script on ranks whose launcher is given some options."""
    return run_on_mpirun(
        ranks,
        HEAD + textwrap.dedent(body),
        folder,
        timeout=timeout,
        environ={"ASYNCDDP_TRANSPORT": transport, **environ},
        options=options,
    )


KILLED = """
bf.init()
bf.set_topology(topology.complete(2))
x = torch.full((300_000,), 1.0)
bf.win_create(x, "x", zero_init=True, associated_p=True)
bf.barrier()
if bf.rank() == 1:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
begun, longest, count, error = time.monotonic(), 0.0, 0, None
verbs = [
    lambda: bf.win_put(x, "x"),
    lambda: bf.win_accumulate(x, "x"),
    lambda: bf.win_update("x"),
    lambda: bf.win_update_then_collect("x"),
    lambda: bf.win_get("x"),
]
while (time.monotonic() < begun + 2.5 or count < 200) and error is None:
    started = time.monotonic()
    try:
        verbs[count % 5]()
    except bf.PeerError as problem:
        error = problem
    longest = max(longest, time.monotonic() - started)
    count += 1
print(f"rank {bf.rank()}: {count} {longest:.2f} {type(error).__name__}: {error}", flush=True)
time.sleep(0.3)
os._exit(0)
"""


@pytest.mark.mpi(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_neighbor_that_is_killed_stops_nobody(tmp_path, transport):
    """Where memory is shared the other one goes on; between machines it is told by the deadline."""
    done = run_on(transport, KILLED, tmp_path, options=["--with-ft", "ulfm"], ASYNCDDP_TIMEOUT="4")
    assert not done.timed_out, done
    assert done.left == (), done
    found = re.search(r"rank 0: (\d+) (\d+\.\d+) (\w+): (.*)", done.stdout)
    assert found, done
    count, longest, kind, message = found.groups()
    if transport == "shared_memory" and kind == "NoneType":
        assert float(longest) < 60.0, done
        assert int(count) > 100, done
    elif transport == "shared_memory":
        assert "rank 0: window 'x': rank 1: it has ended" in message, done
    else:
        assert kind in ("PeerLeftError", "WaitTimeoutError"), done
        assert "process has failed" in message or "missing: rank 1" in message, done
        assert float(longest) < 60.0, done


STOPPED = """
bf.init()
bf.set_topology(topology.complete(2))
x = torch.ones(100_000, dtype=torch.float64)
bf.win_create(x, "x", zero_init=True, associated_p=True)
peer = bf.allgather_object(os.getpid())[1]
shown = Path(__file__).with_name("over")
half = {1 - bf.rank(): 0.5}
if bf.rank() == 1:
    while not shown.exists():
        bf.win_accumulate(x, "x", 0.5, half)
        bf.win_update_then_collect("x")
else:
    longest = 0.0
    for _ in range(40):
        time.sleep(0.01)
        os.kill(peer, signal.SIGSTOP)
        for _ in range(10):
            for verb in (
                lambda: bf.win_accumulate(x, "x", 0.5, half),
                lambda: bf.win_update_then_collect("x"),
            ):
                started = time.monotonic()
                verb()
                longest = max(longest, time.monotonic() - started)
        os.kill(peer, signal.SIGCONT)
    shown.write_text("")
    print(f"longest {longest:.3f}", flush=True)
bf.barrier()
bf.win_update_then_collect("x")
p = bf.allgather_object((bf.win_associated_p("x"), x.sum().item()))
assert abs(sum(one for one, _ in p) - 2) < 1e-12, p
assert abs(sum(total for _, total in p) - 200_000) < 1e-6, p
"""


@pytest.mark.mpi(2)
def test_a_neighbor_that_is_stopped_anywhere_stops_nobody(tmp_path):
    """Stopped 40 times in the middle of sums and collects: the other one never waits for it."""
    done = run_on("shared_memory", STOPPED, tmp_path)
    assert done.code == 0, done
    assert float(re.search(r"longest (\S+)", done.stdout)[1]) < 60, done


LEFT = """
def held():
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except FileNotFoundError:
            continue
    files = [one for one in found if "memfd:asyncddp" in one]
    maps = [one for one in Path("/proc/self/maps").read_text().splitlines() if "asyncddp" in one]
    return len(files), len([one for one in maps if "memfd" in one]), threading.active_count()

for _ in range(4):
    bf.init()
    x = torch.ones(400_000)
    y = torch.ones(10)
    for number in range(5):
        bf.win_create(x, f"x{number}")
        bf.win_create(y, f"y{number}")
        bf.win_put_nonblocking(x, f"x{number}")
        bf.win_accumulate_nonblocking(y, f"y{number}")
        bf.win_update(f"x{number}")
    handle = bf.win_get_nonblocking("x0")
    bf.shutdown()
    del handle
    gc.collect()
    print(f"left {held()}\\n", end="", flush=True)
"""


@pytest.mark.mpi(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_after_a_shutdown_with_windows_open(tmp_path, transport):
    """No file, no mapping, no thread; and the next world begins well."""
    done = run_on(transport, LEFT, tmp_path)
    assert done.code == 0, done
    assert done.stdout.split("\n") == ["left (0, 0, 1)"] * 8 + [""], done
    assert done.stderr == "", done
    assert done.left == ()


FREED = """
bf.init()
from asyncddp.windows import windows_of
import psutil
process, sizes = psutil.Process(), []
for number in range(60):
    x = torch.ones(500_000)
    bf.win_create(x, "x")
    for _ in range(3):
        bf.win_put(x, "x")
        bf.win_update("x")
    bf.win_free("x")
    if number % 20 == 19:
        sizes.append((process.memory_info().rss, process.num_fds()))
(_, _), (before, files), (after, files_after) = sizes
assert after < before + 20_000_000, sizes
assert files_after == files, sizes
"""


@pytest.mark.mpi(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_windows_that_come_and_go_do_not_add_up(tmp_path, transport):
    """2 MB windows, sixty times: neither memory nor open files grow, without a collection."""
    done = run_on(transport, "gc.disable()\n" + FREED, tmp_path)
    assert done.code == 0, done


@pytest.mark.mpi(2)
def test_a_script_that_ends_with_windows_open_prints_nothing(tmp_path):
    """Windows and handles that nobody has closed are no error."""
    script = HEAD + textwrap.dedent("""
    bf.init()
    x = torch.ones(1_000_000)
    bf.win_create(x, "x")
    handles = [bf.win_put_nonblocking(x, "x") for _ in range(3)]
    bf.win_update("x")
    """)
    for transport in TRANSPORTS:
        done = run_on_mpirun(2, script, tmp_path, environ={"ASYNCDDP_TRANSPORT": transport})
        assert done.code == 0, done
        assert (done.stdout, done.stderr, done.left) == ("", "", ()), done
