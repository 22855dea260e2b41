"""Ranks that leave elastic runs between two steps: the others go on, and nothing is made again."""

from __future__ import annotations

import json
import math
import signal

import pytest

LEAVES = """
import json, os, pathlib, signal, sys, time
import asyncddp as bf
import torch

methods, leavers, kills, stop = map(json.loads, sys.argv[1:])
bf.init(topology="exponential_two")
rank, models, optimizers = bf.rank(), [], []
generator = torch.Generator().manual_seed(rank)
inputs, targets = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (3, 1))
for method in methods:
    model = torch.nn.Linear(3, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    models.append(model)
    every = {"communication_interval": 10} if method == "diloco" else {}
    optimizers.append(bf.DistributedOptimizer(sgd, model, algorithm=method, **every))
state = bf.ElasticState(models[0], optimizers[0])
signal.signal(signal.SIGTERM, lambda *_: state.leave())
record = {"steps": [], "sizes": [], "sums": []}
for step in state.steps(stop):
    record["sizes"].append(bf.size())  # before anything is exchanged in the step
    if rank in leavers and step == 20 + 10 * leavers.index(rank):
        os.kill(os.getpid(), signal.SIGTERM)
    if rank in kills and step == 50:
        os.kill(os.getpid(), signal.SIGKILL)
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    record["sums"].append(bf.allreduce(torch.tensor([2.0**rank]), average=False).item())
    record["steps"].append(step)
    if step == 0:
        print("trains", flush=True)
    time.sleep(0.01 if stop > 10**4 else 0)
record["left"] = state.left
if not state.left or stop > 10**4:
    a = sum(bf.allgather((2 / 8) * (inputs.T @ inputs)[None]))
    b = sum(bf.allgather((2 / 8) * (inputs.T @ targets)[None]))
    record["optimum"] = torch.linalg.solve(a, b).flatten().tolist()
record["weights"] = [one.weight.flatten().tolist() for one in models]
pathlib.Path(f"record-{rank}.json").write_text(json.dumps(record))
"""
METHODS = ["gradient_allreduce", "adapt_then_combine", "gradient_tracking", "exact_diffusion",
           "diloco", "choco_sgd", "relay_sgd"]  # fmt: skip


def words(run, methods, leavers, kills, stop):
    """What starts four ranks, some of which leave or are killed."""
    given = map(json.dumps, (methods, leavers, kills, stop))
    return ["--elastic", "-np", "4", *run.warm(LEAVES), *given]


def records(run, ranks):
    """What these ranks have recorded."""
    return [json.loads((run.folder / f"record-{rank}.json").read_text()) for rank in ranks]


@pytest.mark.parametrize(
    "leavers",
    [
        pytest.param([2], marks=pytest.mark.nightly, id="one"),
        pytest.param([0], id="the lowest"),
        pytest.param([3, 1], id="two"),
    ],
)
def test_all_go_on_without_a_rank_that_leaves(run, leavers):
    """All agree on the step, no step is missed, and exact methods come to the others' optimum."""
    ended = run(*words(run, METHODS, leavers, [], 400))
    assert ended.code == 0, ended
    assert "lost" not in ended.stderr
    assert "PeerLeft" not in ended.stderr
    stay = sorted({0, 1, 2, 3} - set(leavers))
    found = records(run, range(4))
    assert [one["left"] for one in found] == [rank in leavers for rank in range(4)]
    for one in found:
        assert one["steps"] == list(range(len(one["steps"])))
    ends = [len(found[rank]["steps"]) for rank in leavers]
    for step in range(400):
        there = [rank for rank in range(4) if rank in stay or step < ends[leavers.index(rank)]]
        for rank in there:
            assert found[rank]["sizes"][step] == len(there)
            assert found[rank]["sums"][step] == sum(2.0**one for one in there)
    for number, method in enumerate(METHODS):
        last = [found[rank]["weights"][number] for rank in stay]
        exact = method in {"gradient_allreduce", "gradient_tracking", "exact_diffusion"}
        mean = [sum(x) / len(stay) for x in zip(*last, strict=True)]
        goal = found[stay[0]]["optimum"] if exact else mean
        near = 1e-9 if exact else 1.0 if method == "diloco" else 0.2
        assert max(math.dist(one, goal) for one in last) < near, (method, last)


def test_a_rank_is_killed_after_another_has_left(run):
    """The two that are left agree on it, and their models stay equal."""
    ended = run(*words(run, ["gradient_allreduce", "adapt_then_combine"], [2], [1], 100))
    assert ended.code == 0, ended
    assert "3 of 4 ranks ended with exit code 0; rank 1 was killed by SIGKILL" in ended.stderr
    first, last = records(run, [0, 3])
    assert first["steps"] == last["steps"] == list(range(100))
    assert (first["sizes"][-1], first["sums"][-1]) == (2, 9)
    assert first["weights"][0] == last["weights"][0]


def test_the_whole_run_leaves_upon_sigterm(run):
    """All end with the same step, and make collectives afterwards, as for a checkpoint."""
    child = run.start(*words(run, ["adapt_then_combine"], [], [], 10**6))
    for _ in range(4):
        assert child.stdout.readline() == "trains\n"
    child.send_signal(signal.SIGTERM)
    stderr = child.communicate(timeout=60)[1]
    found = records(run, range(4))
    assert len({len(one["steps"]) for one in found}) == 1, stderr
    assert not any(one["left"] for one in found)
    assert len({json.dumps(one["optimum"]) for one in found}) == 1


def test_a_rank_of_a_one_sided_method_leaves_at_once(run):
    """The others do not wait for it in any step."""
    ended = run(*words(run, ["win_put"], [1], [], 60))
    assert ended.code == 0, ended
    assert "ended with exit code 1" not in ended.stderr
    assert records(run, [1])[0]["left"]


ENDS = """
import os, signal, sys, time
import asyncddp as bf
import torch

bf.init(timeout=60)
for step in range(100):
    if step == 10 and bf.rank() == 2:
        break
    if step == 10 and bf.rank() == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    bf.allreduce(torch.ones(1))
sys.stdout.write(f"rank {bf.rank()} ends with {bf.size()} at {step}\\n")
"""


def test_a_rank_goes_on_alone_after_one_has_ended_and_another_was_killed(run):
    """Whom it cannot ask any more has left in order, and does not count as out of reach."""
    ended = run("--elastic", "-np", "3", *run.warm(ENDS))
    assert ended.code == 0, ended
    assert "IsolatedError" not in ended.stderr
    assert "rank 0 ends with 1 at 99" in ended.stdout, ended
