"""Sharded replicas of ``asyncddp run --elastic``: where a rank is lost, all of its replica ends."""

from __future__ import annotations

import re
import signal
import time

import pytest
import torch

from tests.support import BEFORE_DEADLINE

pytestmark = pytest.mark.training

STEPS, LOST = 12, 5  # the victim dies in this step

TRAINS = """
import os, signal, sys, time
from pathlib import Path
import asyncddp as bf
import torch
import torch.distributed as dist
from asyncddp.engine.elastic_progress import ElasticProgress
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, LOST, BATCH = 12, 5, 4
method, every, of_all = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "all"
replicas, shards, *victims = map(int, sys.argv[4:])
bf.init()
rank, replica = bf.rank(), bf.rank() // shards
ends = time.monotonic() + 200
folder = Path(f"{replicas}x{shards}")
folder.mkdir(exist_ok=True)

def wait_for(done):
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.002)

begin_round = ElasticProgress.begin_round

def begun(engine, name, number):
    view = begin_round(engine, name, number)
    if number == (LOST + 1) // every - 1:
        (folder / f"begun-{rank}").touch()
    return view

ElasticProgress.begin_round = begun
torch.manual_seed(replica)
model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
mesh = None
if shards > 1:
    dist.init_process_group("gloo")
    every_rank = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replica", "shard"))
    mesh = every_rank["replica"]
    for part in (model[0], model):
        fully_shard(part, mesh=every_rank["shard"])
options = {} if of_all else {"topology": "ring"}
if every > 1:
    options["communication_interval"] = every
start = torch.optim.AdamW(model.parameters(), lr=0.02)
optimizer = bf.DistributedOptimizer(start, model, method, mesh=mesh, **options, broadcast=of_all)
dead = {victim // shards for victim in victims}
living = [one for one in range(replicas * shards) if one // shards not in dead]

def views():
    if mesh is None:
        return bf.view().number
    with bf.replicas(mesh):
        return bf.view().number

for step in range(STEPS):
    if step == LOST and rank in victims:
        if not of_all:
            wait_for(lambda: all((folder / f"begun-{one}").exists() for one in living))
        os.kill(os.getpid(), signal.SIGKILL)
    if step == LOST + 1 or (of_all and step == LOST):
        wait_for(lambda: replica in dead or views() > 0)
    generator = torch.Generator().manual_seed(1000 * replica + step)
    x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64).chunk(shards)[rank % shards]
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
distance = bf.consensus_distance(model, mesh=mesh)
whole = [one.full_tensor() if shards > 1 else one.data for one in model.parameters()]
torch.save([one.detach() for one in whole], folder / f"{rank}.pt")
with bf.average_model(model, mesh=mesh):
    pass
sys.stdout.write(f"{rank} {step + 1} {list(bf.view().members)} {distance:.9f}\\n")
if shards > 1:
    dist.destroy_process_group()
"""


def train(run, method, every, of_all, replicas, shards, *victims):
    """Train, lose ranks, and return the parameters of each rank that is left."""
    words = method, every, "all" if of_all else "some", replicas, shards, *victims
    ranks = str(replicas * shards)
    ended = run("--elastic", "-np", ranks, *run.warm(TRAINS), *map(str, words))
    dead = {victim // shards for victim in victims}
    living = [rank for rank in range(replicas * shards) if rank // shards not in dead]
    assert ended.code == 0, ended
    lines = sorted(ended.stdout.splitlines())
    said = [f"{rank} {STEPS} {living}" for rank in living]
    assert [line.rpartition(" ")[0] for line in lines] == said, ended
    assert len({line.rpartition(" ")[2] for line in lines}) == 1, ended
    for victim in victims:
        assert f"asyncddp: rank {victim} (pid " in ended.stderr
        first = victim - victim % shards
        for mate in set(range(first, first + shards)).difference(victims):
            why = rf"PeerLeftError: replica {victim // shards} ends, since its rank {victim} is "
            assert re.search(rf"asyncddp: rank {mate} \(pid \d+\) .*{why}", ended.stderr), ended
    assert "Traceback" not in ended.stderr, ended
    assert run.wait_until_gone(20) == []
    return [torch.load(run.folder / f"{replicas}x{shards}/{rank}.pt") for rank in living]


@pytest.mark.parametrize(
    ("method", "every", "of_all", "replicas", "victim"),
    [
        ("adapt_then_combine", 1, False, 3, 3),
        ("gradient_tracking", 1, False, 3, 0),
        ("noloco", 2, False, 3, 4),
        ("local_sgd", 2, False, 3, 1),
        ("diloco", 2, True, 2, 0),
        ("gradient_allreduce", 1, True, 2, 3),
    ],
)
def test_survivors_equal_whole_replicas_under_the_same_loss(
    run, method, every, of_all, replicas, victim
):
    """In float64, all columns make the same rounds in the same views as elastic ranks do."""
    sharded = train(run, method, every, of_all, replicas, 2, victim)
    whole = train(run, method, every, of_all, replicas, 1, victim // 2)
    for rank, parameters in enumerate(sharded):
        for one, expected in zip(parameters, whole[rank // 2], strict=True):
            torch.testing.assert_close(one, expected, rtol=0, atol=1e-12)


DIES = """
import os, signal, sys, threading
from pathlib import Path
import asyncddp as bf
import torch
import torch.distributed as dist
from asyncddp.engine.elastic_progress import ElasticProgress
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, LOST = 30, 5
phase, method, victim = sys.argv[1], sys.argv[2], int(sys.argv[3])
bf.init()
rank, replica = bf.rank(), bf.rank() // 2
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (bf.size() // 2, 2), mesh_dim_names=("replica", "shard"))
torch.manual_seed(replica)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()
for part in (model[0], model):
    fully_shard(part, mesh=mesh["shard"])
sgd = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = bf.DistributedOptimizer(
    sgd, model, method, mesh=mesh["replica"], topology="ring", broadcast=False
)

def die(*_):
    if phase == "raises":
        raise ValueError("no data")
    os.kill(os.getpid(), signal.SIGKILL)

def shards():
    return [one.to_local().detach().clone() for one in model.parameters()]

begin_round = ElasticProgress.begin_round

def begins(engine, name, number):
    view = begin_round(engine, name, number)
    if number == LOST and name.startswith("rounds of"):
        die()
    return view

for step in range(STEPS):
    if step == LOST:
        sgd.param_groups[0]["lr"] = 0.0  # from here on ranks average alone
        torch.save(shards(), f"before-{rank}.pt")
        if phase == "hangs" and replica == victim // 2 and rank != victim:
            Path("hangs").touch()
            threading.Event().wait()
        if rank == victim:
            if phase == "average":
                ElasticProgress.begin_round = begins
            elif phase == "backward":
                model[1].register_full_backward_hook(die)
            else:
                while phase == "hangs" and not Path("hangs").exists():
                    pass
                die()
    optimizer.zero_grad()
    model(torch.ones(4, 6, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
torch.save(shards(), f"after-{rank}.pt")
with bf.replicas(mesh["replica"]):
    view = bf.view()
starts = sorted(item for item in view.starts.items() if item[0].startswith("rounds"))
sys.stdout.write(f"{rank} {step + 1} {view.members} {starts}\\n")
bf.barrier()
folder = bf.save_checkpoint("saved", model, optimizer, step=step, mesh=mesh["replica"])
assert bf.load_checkpoint("saved", model, optimizer, mesh=mesh["replica"]).step == step
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        ("average", 0),
        ("average", 3),
        ("backward", 3),
        ("collective", 0),
        ("collective", 3),
        ("hangs", 3),
        ("raises", 3),
    ],
)
def test_one_verdict_for_a_replica_in_every_phase(run, phase, victim):
    """A part's result is one weighted average of what replicas had, whatever its column got."""
    ended = run("--elastic", "-np", "6", *run.warm(DIES), phase, "adapt_then_combine", str(victim))
    living = [rank for rank in range(6) if rank // 2 != victim // 2]
    assert ended.code == 0, ended
    lines = sorted(ended.stdout.splitlines())
    assert [int(line.split()[0]) for line in lines] == living, ended
    assert len({line.partition(" ")[2] for line in lines}) == 1, ended  # one view, from one round
    assert lines[0].split()[1] == "30"
    why = rf"PeerLeftError: replica {victim // 2} ends, since its rank {victim} is lost \("
    assert re.search(rf"asyncddp: rank {victim ^ 1} \(pid \d+\) .*{why}", ended.stderr), ended
    assert run.wait_until_gone(20) == []

    def flat(when, rank):
        return torch.cat([one.flatten() for one in torch.load(run.folder / f"{when}-{rank}.pt")])

    for rank in living:
        begun = torch.stack([flat("before", other) for other in range(rank % 2, 6, 2)], dim=1)
        result = flat("after", rank)
        weights = torch.linalg.lstsq(begun, result).solution
        torch.testing.assert_close(begun @ weights, result, rtol=0, atol=1e-9)
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-8)
        assert float(weights.min()) > -1e-8
        assert float(weights[victim // 2]) < 0.4


REFUSED = """
import sys
import asyncddp as bf
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

bf.init()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))["replica"]
if sys.argv[1] == "late":
    import os, signal, time
    if bf.rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    while bf.view().number == 0:
        time.sleep(0.002)
with bf.replicas(mesh):
    state = bf.ElasticState(torch.nn.Linear(1, 1))
for step in state.steps(1):
    pass
"""


@pytest.mark.parametrize(
    ("options", "case", "error"),
    [
        (("--restarts", "1"), "", "ArgumentError: argument mesh: a replica that is sharded cannot"),
        ((), "", "UsageError: ElasticState: replicas that are sharded can be lost, but neither"),
        ((), "late", "ArgumentError: argument mesh: the run goes on without rank 3, and columns"),
    ],
)
def test_what_is_refused_says_what_to_do(run, options, case, error):
    """Replicas are not replaced, leave not in time, and are made before a rank is lost."""
    ended = run("--elastic", *options, "-np", "4", *run.warm(REFUSED), case)
    assert ended.code != 0
    assert error in ended.stderr, ended
    assert run.wait_until_gone(20) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_tells_of_no_lost_replica(run, number):
    """Ranks that end with the others of their replica are no news then."""
    waits = DIES.replace("for step in", 'Path(f"there-{rank}").touch()\nfor step in')
    child = run.start(
        "--elastic", "-np", "4", *run.warm(waits), "hangs", "adapt_then_combine", "3"
    )  # fmt: skip
    ends = time.monotonic() + BEFORE_DEADLINE
    while len(list(run.folder.glob("there-*"))) < 4 and time.monotonic() < ends:
        time.sleep(0.01)
    child.send_signal(number)
    ended = run.finish(child)
    assert (ended.code, ended.stderr) == (
        128 + number, f"asyncddp run: ended by signal {number} ({number.name})\n"
    )  # fmt: skip
    assert run.wait_until_gone(20) == []
