"""How ranks meet, and that torch's verbs and the library's go on at the same time."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import run_on_mpirun, run_to_end
from tests.support.processes import warm_python, warm_script, warm_server

pytestmark = pytest.mark.launches
MEET = """
import os, sys, torch, torch.distributed as dist
import asyncddp.integrations.torch_distributed
for method in (None, "mpi://"):
    dist.init_process_group("asyncddp", init_method=method)
    x = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(x)
    print("rank", dist.get_rank(), os.environ["LOCAL_RANK"], "sum", x.item(), flush=True)
    dist.destroy_process_group()
"""
BOTH = """
import torch, torch.distributed as dist, asyncddp as bf
import asyncddp.integrations.torch_distributed
bf.init()
dist.init_process_group("asyncddp", init_method="mpi://")
rank, size = dist.get_rank(), dist.get_world_size()
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
for step in range(20):
    ours = torch.full((60_000,), float(rank + step))
    theirs, part = ours.clone(), ours.clone()
    work = dist.all_reduce(theirs, async_op=True)
    mixed = bf.neighbor_allreduce_nonblocking(ours)
    other = dist.all_reduce(part, group=halves[rank // 2], async_op=True)
    mean = bf.allreduce(ours)
    assert torch.equal(theirs if work.wait() else ours, torch.full_like(ours, 6.0 + 4 * step))
    other.wait()
    assert torch.equal(part, torch.full_like(ours, [1.0, 5.0][rank // 2] + 2 * step))
    assert torch.allclose(mean, torch.full_like(ours, 1.5 + step))
    assert mixed.wait().shape == ours.shape
bf.shutdown()
dist.barrier()
dist.destroy_process_group()
bf.init()
dist.init_process_group("asyncddp", init_method="mpi://")
x = torch.ones(1)
dist.all_reduce(x)
print("again", x.item(), bf.allreduce(x).item(), flush=True)
"""
DIES = """
import torch, torch.distributed as dist
import asyncddp.integrations.torch_distributed
dist.init_process_group("asyncddp", init_method="mpi://")
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("rank 1 has lost its data")
dist.all_reduce(torch.ones(10))
"""
MIXED = """
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers torch's backend without messages
import asyncddp.integrations.torch_distributed
meta = torch.device("meta")
for config in ("cpu:asyncddp,meta:fake", "meta:fake,cpu:asyncddp"):
    dist.init_process_group(config, init_method="mpi://")
    every = dist.distributed_c10d._get_default_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for group in (every, dist.new_group([0, 1]), dist.new_group(backend=config)):
        ours = torch.full((3,), float(rank))
        dist.all_reduce(ours, group=group)
        assert ours.tolist() == [1.0] * 3
        theirs, whole = torch.empty((2, 3), device=meta).unbind()
        try:
            work = dist.all_reduce(theirs, group=group, async_op=True)
            assert type(work).__name__ == "FakeWork"
            dist.broadcast(whole, 0, group=group)
        except NotImplementedError:
            assert torch.__version__ < "2.8", "which has kernels for tensors without memory"
        with dist._coalescing_manager(group, device=torch.device("cpu")):
            dist.all_reduce(ours, group=group)
            dist.all_reduce(more := torch.ones(2), group=group)
        assert [*ours.tolist(), *more.tolist()] == [2.0] * 5
        assert group._get_backend(meta).__class__.__name__ == "FakeProcessGroup"
        assert dist.distributed_c10d._find_pg_by_ranks_and_tag("", [0, 1]) is every
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    assert not dist.distributed_c10d._world.pg_names
"""
LATE = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import asyncddp.integrations.torch_distributed
dist.init_process_group("asyncddp", init_method="mpi://")
model = DistributedDataParallel(torch.nn.Linear(3, 3))
model(torch.ones(2, 3)).sum().backward()
work = dist.all_reduce(torch.ones(300_000), async_op=True)
print("left", flush=True)
"""


UNDER_TORCHRUN = """
import torch, torch.distributed as dist
import asyncddp.integrations.torch_distributed
for again in range(2):
    dist.init_process_group("asyncddp")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((300_000,), float(rank))
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert torch.equal(x, torch.full_like(x, (size - 1) / 2))
    pair = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(y := torch.full((5,), float(rank)), group=pair)
        assert y.tolist() == [2.0] * 5
    every = [None] * size
    dist.all_gather_object(every, rank)
    assert every == list(range(size))
    dist.destroy_process_group()
print(f"rank {rank} of {size}", flush=True)
"""


@pytest.mark.parametrize("way", ["torchrun", "asyncddp run --launcher local"])
def test_without_mpi_the_backend_takes_the_library_s_sockets(way: str, tmp_path: Path) -> None:
    """Under torchrun, and under our launcher that needs no MPI either."""
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN, encoding="utf-8")
    if way == "torchrun":
        python = warm_server().python
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
        command = [python, *start, "--no-python", python, str(script)]
    else:
        start = ["-m", "asyncddp", "run", "--launcher", "local", "-np", "3"]
        command = [sys.executable, *start, *warm_script(str(script))]
    ended = run_to_end(command)
    assert ended.code == 0, ended
    for rank in range(3):
        assert ended.stdout.count(f"rank {rank} of 3") == 1, ended


@pytest.mark.parametrize("way", ["mpirun", "asyncddp run"])
def test_env_and_mpi_rendezvous_work_under_each_launcher(way: str, tmp_path: Path) -> None:
    """``mpirun`` sets no MASTER_ADDR; with ``asyncddp run`` torch's own ``env://`` is taken."""
    if way == "mpirun":
        ended = run_on_mpirun(2, MEET, tmp_path)
    else:
        script = tmp_path / "script.py"
        script.write_text(MEET, encoding="utf-8")
        ended = run_to_end([warm_python(), "-m", "asyncddp", "run", "-np", "2", str(script)])
    assert ended.code == 0, ended
    for rank in range(2):
        assert ended.stdout.count(f"rank {rank} {rank} sum 3.0") == 2, ended


def test_verbs_of_torch_and_of_the_library_go_on_at_the_same_time(tmp_path: Path) -> None:
    """Neither matches messages of the other; both can be ended and begun again."""
    ended = run_on_mpirun(4, BOTH, tmp_path)
    assert ended.code == 0, ended
    assert ended.stdout.count("again 4.0 4.0") == 4, ended


def test_other_backends_serve_their_devices_beside_this_one(tmp_path: Path) -> None:
    """In groups of all and of some ranks."""
    ended = run_on_mpirun(2, MIXED, tmp_path)
    assert ended.code == 0, ended
    assert "Warning" not in ended.stderr, ended


def test_a_rank_that_raises_ends_all_and_says_why(tmp_path: Path) -> None:
    """Under plain mpirun, while others wait for it in a collective."""
    ended = run_on_mpirun(3, DIES, tmp_path, timeout=60.0)
    assert ended.code != 0, ended
    assert not ended.timed_out, ended
    assert not ended.left, ended
    assert "rank 1 has lost its data" in ended.stderr + ended.stdout, ended


def test_a_script_that_never_destroys_its_group_ends(tmp_path: Path) -> None:
    """Also with a collective under way at its end."""
    ended = run_on_mpirun(2, LATE, tmp_path, timeout=60.0)
    assert ended.code == 0, ended
    assert len(re.findall("left", ended.stdout)) == 2, ended
