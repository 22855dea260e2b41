"""Processes that a rank forks: they work on, but never speak for the rank."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import REPO, mpirun, run_to_end, warm_server

SCRIPT = """
import multiprocessing, os, sys, time, traceback
from pathlib import Path
import torch
from torch.utils.data import DataLoader
import asyncddp as bf

FORKED = Path(__file__).with_name("forked")

def told(call):
    try:
        return f"returned {call()}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

class Numbers:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return 100 * bf.rank() + index + bf.size() / 1000  # what is only read is there

def in_child(pending, posted, net, optimizer, module):
    x = torch.ones(2)
    calls = {
        "allreduce": lambda: bf.allreduce(x),
        "neighbor_allreduce": lambda: bf.neighbor_allreduce(x, name="w"),
        "nonblocking": lambda: bf.neighbor_allreduce_nonblocking(x, name="w").wait(),
        "pending": pending.wait,
        "posted": posted.wait,
        "barrier": bf.barrier,
        "object": lambda: bf.broadcast_object("mine"),
        "win_put": lambda: bf.win_put(x, "window"),
        "win_update": lambda: bf.win_update("window"),
        "win_accumulate": lambda: bf.win_accumulate(x, "window"),
        "win_get": lambda: bf.win_get("window"),
        "win_create": lambda: bf.win_create(x, "another"),
        "win_free": lambda: bf.win_free("window"),
        "win_mutex": lambda: bf.win_mutex("window").__enter__(),
        "pair_gossip": lambda: bf.pair_gossip(x, 0),
        "allgather": lambda: bf.allgather(x),
        "reduce_scatter": lambda: bf.reduce_scatter(x),
        "broadcast_parameters": lambda: bf.broadcast_parameters(net),
        "average_model": lambda: bf.average_model(net).__enter__(),
        "init": bf.init,
        "step": optimizer.step,
        "module": lambda: module(torch.ones(1, 2)).sum().backward(),
    }
    found = {name: told(call) for name, call in calls.items()}
    found["is_initialized"] = bf.is_initialized()
    found["rank"] = bf.rank()
    bf.shutdown()
    return found

def by_fork(*args):
    sender, receiver = os.pipe()[::-1]
    child = os.fork()
    if child == 0:
        os.write(sender, repr(in_child(*args)).encode())
        sys.exit(7)
    os.close(sender)
    with open(receiver) as found:
        text = found.read()
    assert os.path.exists(os.path.join(os.environ["ASYNCDDP_REPORT_DIR"], "started-1"))
    return eval(text), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def process_case(queue, *args):
    queue.put(in_child(*args))

bf.init()
me = bf.rank()
x = torch.full((2,), float(me))
for _ in range(4):  # from the third on through shared memory
    bf.neighbor_allreduce(x, name="w")
bf.win_create(torch.zeros(2), "window")
net = torch.nn.Linear(2, 1)
optimizer = bf.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
net(torch.ones(1, 2)).sum().backward()
optimizer.step()
module = bf.DecentralizedDataParallel(
    torch.nn.Linear(2, 1), lambda params: torch.optim.SGD(params, lr=0.1))
module(torch.ones(1, 2)).sum().backward()
pending = bf.allreduce_nonblocking(x) if me == 1 else None
if me == 1:
    posted = bf.neighbor_allreduce_nonblocking(x, name="w")
    before = [p.clone() for p in net.parameters()]
    found, code = by_fork(pending, posted, net, optimizer, module)
    assert code == 7, code
    queue = multiprocessing.get_context("fork").SimpleQueue()
    process = multiprocessing.get_context("fork").Process(
        target=process_case, args=(queue, pending, posted, net, optimizer, module))
    process.start()
    again = queue.get()
    process.join()
    assert process.exitcode == 0 and again.keys() == found.keys()
    for name in found:
        print(f"child {name}: {found[name]}", flush=True)
    if (child := os.fork()) == 0:
        raise ValueError("of the child alone")
    print("raised", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    FORKED.touch()
else:
    while not FORKED.exists():  # else what is pending may have ended before rank 1 forks
        time.sleep(0.02)
    pending = bf.allreduce_nonblocking(x)
    posted = bf.neighbor_allreduce_nonblocking(x, name="w")
assert pending.wait().tolist() == [0.5, 0.5], pending.wait()
assert posted.wait().tolist() == [0.5, 0.5], posted.wait()
seen = torch.cat(list(DataLoader(Numbers(), batch_size=4, num_workers=2)))
assert torch.allclose(seen, torch.arange(8.0).double() + 100 * me + 0.002), seen
y = bf.allreduce(torch.full((3,), 10.0 * me))
print(f"rank {me} ended with {y.tolist()} after {len(seen)} samples\\n", end="", flush=True)
"""
REFUSED = [
    "allreduce",
    "neighbor_allreduce",
    "nonblocking",
    "pending",
    "posted",
    "barrier",
    "object",
    "win_put",
    "win_update",
    "win_accumulate",
    "win_get",
    "win_create",
    "win_free",
    "win_mutex",
    "pair_gossip",
    "allgather",
    "reduce_scatter",
    "broadcast_parameters",
    "average_model",
    "init",
    "step",
    "module",
]


@pytest.mark.mpi(2)
def test_a_forked_process_never_speaks_for_its_rank(tmp_path):
    """Verbs, handles, windows and optimizers raise there; the rank, and workers of data, go on."""
    script, reports = tmp_path / "script.py", tmp_path / "reports"
    script.write_text(SCRIPT)
    reports.mkdir()
    rank = str(REPO / "asyncddp" / "launch" / "rank.py")
    command = mpirun(2, *warm_server().command(rank, str(script)))
    settings = {"ASYNCDDP_TIMEOUT": "60", "ASYNCDDP_REPORT_DIR": str(reports)}
    done = run_to_end(command, environ=settings)
    assert done.code == 0, done
    left = sorted(path.name for path in reports.iterdir())
    assert left == ["ended-0", "ended-1", "joined-0", "joined-1"], "no report"
    found = dict(re.findall(r"^child (\w+): (.*)$", done.stdout, re.M))
    for name in REFUSED:
        assert found[name].startswith("NotInitializedError: "), (name, found[name])
        assert "this process was forked from rank 1 (process " in found[name], found[name]
        assert "Call verbs in the process that called init(), or start" in found[name]
    assert found["is_initialized"] == "False"
    assert found["rank"] == "1"
    assert "raised 1" in done.stdout
    assert "ValueError: of the child alone" in done.stderr
    assert "[asyncddp]" not in done.stderr, done
    for rank in (0, 1):
        assert f"rank {rank} ended with [5.0, 5.0, 5.0] after 8 samples" in done.stdout, done
