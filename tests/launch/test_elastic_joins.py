"""Processes that take the place of killed ranks: they join in the middle, and nobody goes back."""

from __future__ import annotations

import json
import math

import pytest

JOINS = """
import json, os, pathlib, signal, sys, time
import asyncddp as bf
import torch

methods, victims, more = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
bf.init(topology="exponential_two")
rank, models, optimizers = bf.rank(), [], []
generator = torch.Generator().manual_seed(rank)
inputs, targets = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (3, 1))
for method in methods:
    model = torch.nn.Linear(3, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 1.0)
    momentum = 0.5 * (method in ("gradient_allreduce", "diloco"))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    models.append(model)
    every = {"communication_interval": 10} if method == "diloco" else {}
    optimizers.append(bf.DistributedOptimizer(sgd, model, algorithm=method, **every))
parts = {f"model{n}": one for n, one in enumerate(models[1:])}
parts |= {f"optimizer{n}": one for n, one in enumerate(optimizers[1:])}
try:
    state = bf.ElasticState(models[0], optimizers[0], **parts)
except bf.AsyncDDPError:
    pathlib.Path("refused").touch()
    raise
record = {"joined": state.joined, "first": state.step, "steps": [], "sizes": []}
record["weights"] = [[one.weight.flatten().tolist()] for one in models]
end = None
for step in state.steps(10**6):
    if rank in victims and not state.joined and step == 20 + 3 * victims.index(rank):
        os.kill(os.getpid(), signal.SIGKILL)
    record["steps"].append(step)
    record["sizes"].append(bf.size())
    for number, (model, optimizer) in enumerate(zip(models, optimizers)):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        record["weights"][number].append(model.weight.flatten().tolist())
    back = bf.size() == 4 and bf.view().number > 1
    if len(victims) > 1:  # who die in one view or in two
        back = sum(bf.allgather(torch.tensor([float(state.joined)]))) == len(victims)
    if end is None and back:
        end = step + more
    if step == end or pathlib.Path("refused").exists():
        break
    time.sleep(0.002 if end is None else 0)
a = sum(bf.allgather((2 / 8) * (inputs.T @ inputs)[None]))
b = sum(bf.allgather((2 / 8) * (inputs.T @ targets)[None]))
record["optimum"] = torch.linalg.solve(a, b).flatten().tolist()
pathlib.Path(f"record-{rank}.json").write_text(json.dumps(record))
"""


def joined_runs(run, methods, victims, more):
    """What each rank has recorded in a run of four, of which some are killed and replaced."""
    words = [json.dumps(methods), json.dumps(victims), str(more)]
    options = "--elastic", "--restarts", str(len(victims)), "-np", "4"
    ended = run(*options, *run.warm(JOINS), *words)
    assert ended.code == 0, ended
    assert "4 of 4 ranks ended with exit code 0" in ended.stderr, ended.stderr
    for rank in victims:
        assert f"rank {rank} was killed by SIGKILL, and was replaced" in ended.stderr
    files = (run.folder / f"record-{rank}.json" for rank in range(4))
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def methods():
    """Methods of different families, all in one run."""
    return ["gradient_allreduce", "adapt_then_combine", "gradient_tracking", "exact_diffusion",
            "diloco", "choco_sgd", "relay_sgd"]  # fmt: skip


@pytest.mark.parametrize("victim", [2, 0], ids=["another", "the lowest rank"])
def test_a_replacement_goes_on_with_the_state_and_the_steps_of_the_others(run, methods, victim):
    """No step is lost or made again, and each method goes on to what four ranks agree on.

    The replacement has the sender's weights of that step bit by bit. Ranks that average gradients
    have the same bits in every step. Exact methods reach the optimum of all four ranks' data.
    """
    records = joined_runs(run, methods, [victim], 300)
    sender = min({*range(4)} - {victim})
    new, first = records[victim], records[victim]["first"]
    assert [one["joined"] for one in records] == [rank == victim for rank in range(4)]
    for rank, one in enumerate(records):
        begun = first if rank == victim else 0
        assert one["steps"] == list(range(begun, records[sender]["steps"][-1] + 1))
        assert one["sizes"][first - begun :] == [4] * (len(one["steps"]) - first + begun)
    for number, method in enumerate(methods):
        every = [one["weights"][number] for one in records]
        assert every[victim][0] == every[sender][first], method
        last = [weights[-1] for weights in every]
        if method == "gradient_allreduce":
            for weights in every[victim], every[3]:
                since = len(weights) - len(every[victim])
                assert weights[since:] == every[sender][first:], method
        exact = method in {"gradient_allreduce", "gradient_tracking", "exact_diffusion"}
        goal = new["optimum"] if exact else [sum(x) / 4 for x in zip(*last, strict=True)]
        near = 1e-9 if exact else 1.0 if method == "diloco" else 0.2  # it is between two rounds
        assert max(math.dist(one, goal) for one in last) < near, (method, last)


def test_two_ranks_are_replaced_one_after_the_other(run):
    """They join one at a time, and all four end in one view with equal models."""
    records = joined_runs(run, ["gradient_allreduce", "adapt_then_combine"], [1, 3], 40)
    assert [one["joined"] for one in records] == [False, True, False, True]
    assert len({one["steps"][-1] for one in records}) == 1
    assert len({json.dumps(one["weights"][0][-1]) for one in records}) == 1


def test_a_method_of_windows_lets_nobody_join(run):
    """The replacement ends at once and says why, and the others train on."""
    words = "--elastic", "--restarts", "1", "-np", "3", *run.warm(JOINS)
    ended = run(*words, json.dumps(["win_put"]), "[1]", "1")
    assert "no rank can join while there are windows: 'DistributedOptimizer0" in ended.stderr
    assert "2 of 3 ranks ended with exit code 0; rank 1 ended with exit code 1" in ended.stderr
    assert ended.code == 0
