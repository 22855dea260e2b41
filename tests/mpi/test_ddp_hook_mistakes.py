"""Mistakes with the hooks for DDP are named, on every rank, and nothing hangs."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import asyncddp as bf
from asyncddp import hooks, topology
from asyncddp.errors import ArgumentError, MismatchError, UnknownNameError
from asyncddp.hooks.registration import check_device
from asyncddp.topology import TopologyError
from tests.support import PATIENCE, on, run_on_mpirun
from tests.support.ddp_training import BACKENDS, grouped, loss_of, make_ddp, make_model

backends = pytest.mark.parametrize("backend", BACKENDS)


@grouped
def finds_mistakes():
    words = r"ByteGradState: argument module: expected a torch\.nn\.parallel\.DistributedDataPara"
    with pytest.raises(ArgumentError, match=words):
        hooks.ByteGradState(make_model())
    ddp = make_ddp()
    words = r"GossipParametersState: argument topology: ring\(5\) is for 5 ranks, but the modul"
    with pytest.raises(TopologyError, match=words):
        hooks.GossipParametersState(ddp, topology.ring(5))
    with pytest.raises(UnknownNameError, match="unknown compressor 'sgin'"):
        hooks.CompressedAllreduceState(ddp, "sgin")
    state = hooks.ByteGradState(ddp)
    with pytest.raises(ArgumentError, match=r"expected a GossipParametersState, got ByteGrad"):
        hooks.gossip_parameters_hook(state, None)
    with pytest.raises(ArgumentError, match=r"expected a torch\.distributed\.GradBucket, got T"):
        hooks.bytegrad_hook(state, torch.zeros(3))
    words = r"parameters are on cuda:0, for which the process group has 'gloo', which sends CPU"
    with pytest.raises(ArgumentError, match=words):
        check_device("ByteGradState", dist.group.WORLD, torch.device("cuda", 0))
    with pytest.raises(ArgumentError, match="process group has no backend for it"):
        check_device("ByteGradState", dist.group.WORLD, torch.device("meta"))


@on("mpi-2")
@backends
def test_mistakes_are_named(world, backend, tmp_path):
    """No DDP module, a graph of another size, the wrong state, a device that is not served."""
    world.run(finds_mistakes, backend, str(tmp_path))


@grouped
def sets_different_things():
    ddp, rank = make_ddp(), bf.rank()
    with pytest.raises(MismatchError, match=r"got CompressedAllreduceState\(Sign\(\)|FP16"):
        hooks.CompressedAllreduceState(ddp, ["sign", "fp16"][rank % 2])
    graphs = [topology.ring(4), topology.ring(4, style="right")]
    with pytest.raises(MismatchError, match="the hook's settings differ: expected the same on"):
        hooks.GossipParametersState(ddp, graphs[rank % 2])
    kind = TopologyError if rank == 2 else MismatchError
    words = r"is for 5 ranks, but" if rank == 2 else r"rank 2 has a mistake: TopologyError"
    with pytest.raises(kind, match=words):
        hooks.GossipParametersState(ddp, topology.ring(4 + (rank == 2)))
    kind = UnknownNameError if rank == 3 else MismatchError
    words = "unknown compressor 'sgin'" if rank == 3 else "rank 3 has a mistake: UnknownNameError"
    with pytest.raises(kind, match=words):
        hooks.CompressedAllreduceState(ddp, "sgin" if rank == 3 else "sign")
    hooks.GossipParametersState(ddp, topology.ring(4))


@on("mpi-4")
@backends
def test_other_settings_on_one_rank_raise_on_all(world, backend, tmp_path):
    """Ranks compare their settings when the state is made, and hear of another's mistake."""
    world.run(sets_different_things, backend, str(tmp_path))


HOOK_FAILS = """
import os, sys, time, datetime
import torch, torch.distributed as dist, topology
from asyncddp import hooks
from tests.support.ddp_training import make_ddp

rank, size = (int(os.environ["OMPI_COMM_WORLD_" + name]) for name in ("RANK", "SIZE"))
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("{backend}", init_method="file://{folder}/store", rank=rank,
                        world_size=size, timeout=datetime.timedelta(seconds={timeout}))
ddp = make_ddp()
state = hooks.{state}
ddp.register_comm_hook(state, hooks.{hook})
for _ in range(2):  # after the first, DDP agrees on its buckets
    ddp(torch.ones(2, 6)).sum().backward()
output = ddp(torch.ones(2, 6)).sum()
if rank == 1:
    {rank_1}
begun = time.monotonic()
try:
    output.backward()
except BaseException as error:
    print(f"{{rank}}: {{type(error).__name__}}: {{error}}", flush=True)
    print(f"{{rank}} took {{time.monotonic() - begun:.0f}}", flush=True)
os._exit(0)
"""
STATES = {
    "neighbor_allreduce_hook": "NeighborAllreduceState(ddp, topology.ring(2))",
    "gossip_parameters_hook": "GossipParametersState(ddp, topology.ring(2))",
    "bytegrad_hook": "ByteGradState(ddp)",
}


@pytest.mark.launches
@backends
@pytest.mark.parametrize("hook", STATES)
def test_a_rank_that_leaves_is_named(tmp_path, backend, hook):
    """Its neighbours raise a PeerLeftError out of backward, long before the timeout."""
    text = HOOK_FAILS.format(
        backend=backend, folder=tmp_path, timeout=600, hook=hook, state=STATES[hook],
        rank_1="os._exit(0)",
    )  # fmt: skip
    done = run_on_mpirun(2, text, tmp_path)
    assert not done.timed_out, done
    assert f"0: PeerLeftError: {hook}, bucket 0 on rank 0: " in done.stdout, done
    assert done.seconds < PATIENCE
    assert not done.left


@pytest.mark.launches
@backends
def test_a_rank_that_does_not_come_is_named(tmp_path, backend):
    """By the timeout of the process group backward raises a WaitTimeoutError."""
    text = HOOK_FAILS.format(
        backend=backend, folder=tmp_path, timeout=2, hook="gossip_parameters_hook",
        state=STATES["gossip_parameters_hook"], rank_1="time.sleep(8)",
    )  # fmt: skip
    begun = time.monotonic()
    done = run_on_mpirun(2, text, tmp_path)
    assert "0: WaitTimeoutError: gossip_parameters_hook, bucket 0 on rank 0: " in done.stdout, done
    assert "receiving from 1 did not end by the timeout of the process group" in done.stdout
    assert time.monotonic() - begun < 60


@grouped
def raises_in_backward():
    ddp = make_ddp()
    state = hooks.CompressedAllreduceState(ddp, "top_k")
    state.codecs.compressor = _Refusing()
    ddp.register_comm_hook(state, hooks.compressed_allreduce_hook)
    with pytest.raises(ArgumentError, match="cannot be encoded"):
        loss_of(ddp, bf.rank(), 0).backward()


class _Refusing:
    """A compressor that encodes nothing."""

    name = "refusing"

    def new_state(self, chunks):
        return {}

    def encoded_size(self, numel, dtype):
        raise ArgumentError(f"{numel} elements cannot be encoded")


@on("mpi-2")
@backends
def test_an_error_in_a_hook_is_raised_by_backward(world, backend, tmp_path):
    """It keeps its type and its words."""
    world.run(raises_in_backward, backend, str(tmp_path))
