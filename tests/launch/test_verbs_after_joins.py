"""Verbs of machines and groups in elastic runs, before and after a rank is replaced."""

from __future__ import annotations

import json

import pytest

VERBS = """
import json, os, pathlib, signal
import asyncddp as bf
import topology, torch

bf.init()
rank, found = bf.rank(), {}
x = torch.tensor([2.0**rank])
bf.set_machine_topology(topology.ring(2))
model = torch.nn.Linear(1, 1)
state = bf.ElasticState(model)

def note(when, verb, call):
    try:
        found[f"{when} {verb}"] = call()
    except bf.AsyncDDPError as error:
        found[f"{when} {verb}"] = f"{type(error).__name__}: {error}"

def all_verbs(when, group):
    note(when, "local", lambda: bf.local_allreduce(x, average=False).item())
    note(when, "mean", lambda: bf.local_allreduce(x).item())
    note(when, "hierarchical", lambda: bf.hierarchical_allreduce(x, average=False).item())
    note(when, "machines", lambda: bf.hierarchical_neighbor_allreduce(x).item())
    note(when, "group", lambda: group and bf.allreduce(x, average=False, group=group).item())

def new_group():
    group = bf.new_group([0, 1, 2])
    return group if rank in group else None

if state.joined:
    group = None
else:
    group = new_group()
    all_verbs("before", group)
for step in state.steps(10**6):
    if step == 5 and rank == 1 and not state.joined:
        os.kill(os.getpid(), signal.SIGKILL)
    if bf.view().joined:  # on all in the same step
        break
    fewer = bf.allreduce(torch.tensor([float(bf.size() == 3)]), op="min").item()
    if fewer and "lost local" not in found:
        all_verbs("lost", None)
    bf.neighbor_allreduce(x)
if not state.joined:
    note("old", "group", lambda: group and bf.allreduce(x, average=False, group=group).item())
all_verbs("new", new_group())
pathlib.Path(f"found-{rank}.json").write_text(json.dumps(found))
"""


def values(found, when, verb):
    """Return the results of a verb by rank."""
    return [one.get(f"{when} {verb}") for one in found]


def test_machines_and_groups_take_a_replacement_for_the_rank_before(run):
    """Four ranks on two machines give all results anew once rank 1 was killed and replaced.

    Until then verbs of machines go on without it, or say that they need all. A group of before says
    at once that it is to be made anew.
    """
    options = (
        "--elastic",
        "--restarts",
        "1",
        "-np",
        "4",
        "--ranks-per-machine",
        "2",
        "--timeout",
        "20",
    )
    ended = run(*options, *run.warm(VERBS))
    assert "4 of 4 ranks ended with exit code 0" in ended.stderr, ended.stderr
    files = (run.folder / f"found-{rank}.json" for rank in range(4))
    found = [json.loads(file.read_text()) for file in files]
    for verb, expected in {
        "local": [3, 3, 12, 12],
        "mean": [1.5, 1.5, 6, 6],
        "hierarchical": [15] * 4,
        "machines": [3.75] * 4,
        "group": [7, 7, 7, None],
    }.items():
        before = values(found, "before", verb)
        assert [before[rank] for rank in (0, 2, 3)] == [expected[rank] for rank in (0, 2, 3)], verb
        assert values(found, "new", verb) == expected, verb
    assert values(found, "lost", "local") == [1, None, 12, 12]
    assert values(found, "lost", "hierarchical") == [13, None, 13, 13]
    for rank in 0, 2, 3:
        told = found[rank]["lost machines"]
        assert told.startswith(f"PeerLeftError: rank {rank}: hierarchical_neighbor_allreduce: "), (
            told
        )
        assert "those that have left are rank 1; take neighbor_allreduce" in told
    for rank in 0, 2:
        told = found[rank]["old group"]
        assert told.startswith("ArgumentError: allreduce: argument group: "), told
        assert "another process has taken the place of rank 1 since: call new_group again" in told
    assert found[3]["old group"] is None


MACHINES = """
import json, os, pathlib, signal, sys
import asyncddp as bf
import topology, torch

bf.init(timeout=60)
bf.set_machine_topology(topology.ring(2))
model = torch.nn.Linear(3, 1)
sgd = torch.optim.SGD(model.parameters(), 0.1)
where = {"algorithm": sys.argv[1], "communication": "hierarchical_neighbor_allreduce"}
optimizer = bf.DistributedOptimizer(sgd, model, **where)
for step in range(10**6):
    if step == 10 and bf.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(1, 3)).sum().backward()
    try:
        optimizer.step()
    except bf.AsyncDDPError as error:
        pathlib.Path(f"error-{bf.rank()}").write_text(f"{type(error).__name__}: {error}")
        break
"""


@pytest.mark.parametrize("method", ["adapt_then_combine", "choco_sgd"])
def test_averages_between_machines_end_on_all_ranks_when_one_dies(run, method):
    """No rank waits until its deadline, also where its own machine is whole."""
    options = "--elastic", "-np", "4", "--ranks-per-machine", "2"
    ended = run(*options, *run.warm(MACHINES), method)
    assert ended.code == 0, ended
    for rank in 0, 2, 3:
        told = (run.folder / f"error-{rank}").read_text()
        assert told.startswith("PeerLeftError"), (rank, told)
        assert "rank 1" in told, (rank, told)
