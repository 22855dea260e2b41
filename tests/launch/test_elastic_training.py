"""Processes of ``asyncddp run --elastic`` that are killed while they train: the others train on."""

from __future__ import annotations

import pytest

TRAINS = """
import os, signal, sys
import asyncddp as bf
import torch

bf.init(topology="one_peer_exponential")
rank = bf.rank()
model = torch.nn.Linear(4, 1, bias=False).double()
torch.nn.init.constant_(model.weight, 1.0)
sgd = torch.optim.SGD(model.parameters(), lr=0.02)
optimizer = bf.DistributedOptimizer(sgd, model, algorithm=sys.argv[1])
generator = torch.Generator().manual_seed(rank)
inputs = torch.randn(8, 4, generator=generator).double()
for step in range(120):
    if rank in map(int, sys.argv[2:]) and step == 20 + rank:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
with bf.average_model(model):
    total = model.weight.sum().item()
bf.barrier()
sys.stdout.write(f"{rank} {bf.size()} {list(bf.view().members)} {total:.9f}\\n")
"""


@pytest.mark.parametrize("dead", [(2,), (0, 3)], ids=["one", "rank 0 and another"])
@pytest.mark.parametrize("method", ["adapt_then_combine", "gradient_allreduce", "win_put"])
def test_the_others_train_on_and_average_their_models(run, method, dead):
    """They are in one view, have one average, and the run succeeds."""
    words = "--elastic", "-np", "4", run.script(TRAINS), method, *map(str, dead)
    ended = run(*words)
    assert ended.code == 0, ended
    lines = sorted(ended.stdout.splitlines())
    living = [rank for rank in range(4) if rank not in dead]
    assert [int(line.split()[0]) for line in lines] == living, ended
    said = {line.split(maxsplit=1)[1] for line in lines}
    assert len(said) == 1, said  # the same view and average on all
    assert said.pop().startswith(f"{len(living)} {living} "), lines
    for rank in dead:
        assert f"rank {rank} (pid " in ended.stderr


LAGS = """
import os, signal, sys, threading, time
import asyncddp as bf
import torch

bf.init(topology="one_peer_exponential")
rank, x = bf.rank(), torch.ones(1 << 18)
for use in range(20):
    bf.neighbor_allreduce(x, name="x")
bf.barrier()
if rank == 2:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
while rank == 3 and bf.view().number == 0:
    time.sleep(0.01)
for use in range(20):
    bf.neighbor_allreduce(x, name="x")
sys.stdout.write(f"{rank} {list(bf.view().members)}\\n")
"""


def test_a_rank_that_is_behind_ends_its_rounds_along_the_former_edges(run):
    """Rank 3 makes rounds in which others were at the death, after it has learned of the view."""
    ended = run("--elastic", "-np", "4", *run.warm(LAGS))
    assert ended.code == 0, ended
    assert sorted(ended.stdout.splitlines()) == [f"{rank} [0, 1, 3]" for rank in (0, 1, 3)]


LOADS = """
import os, signal, sys, time
import asyncddp as bf
import torch

bf.init()
if bf.rank() == 0:
    os.kill(os.getpid(), signal.SIGKILL)
while bf.view().number == 0:
    time.sleep(0.002)
model = torch.nn.Linear(1, 1)
torch.nn.init.constant_(model.weight, bf.rank())
bf.save_checkpoint("saved", model, step=1)
assert bf.load_checkpoint("saved", model).step == 1
sys.stdout.write(f"{bf.rank()} {model.weight.item()}\\n")
"""


def test_a_checkpoint_is_read_without_the_first_rank(run):
    """One of those that are left reads it for the others."""
    ended = run("--elastic", "-np", "3", *run.warm(LOADS))
    assert (ended.code, sorted(ended.stdout.splitlines())) == (0, ["1 1.5", "2 1.5"]), ended
