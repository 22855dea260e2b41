"""Cases of torch's NCCL: each is a rank's, in a process group of a backend."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from asyncddp import hooks, topology
from asyncddp.transport.cuda.capabilities import default_device_index
from tests.support.ddp_training import SMALL, batch_of, flat, grouped, make_model

__all__ = ["HOOKS", "hooked", "sharded", "talks", "told_apart"]

HOOKS = ("gossip_parameters", "neighbor_allreduce", "bytegrad")
_STEPS, _LR = 5, 0.05


def told_apart():
    """Whether NCCL is told that this rank's machine is another than its neighbours'."""
    return "NCCL_HOSTID" in os.environ or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def _gpu():
    device = torch.device("cuda", default_device_index(dist.get_rank()))
    torch.cuda.set_device(device)
    return device


@grouped
def talks():
    """The sum of ranks + 1, and whether the other rank's message came."""
    device, rank = _gpu(), dist.get_rank()
    x = torch.full((1000,), rank + 1.0, device=device)
    dist.all_reduce(x)
    given, come = torch.full((9,), float(rank), device=device), torch.zeros(9, device=device)
    pair = [dist.P2POp(dist.isend, given, 1 - rank), dist.P2POp(dist.irecv, come, 1 - rank)]
    for request in dist.batch_isend_irecv(pair):
        request.wait()
    return x[0].item(), come.eq(1 - rank).all().item()


def _register(ddp, hook):
    graph = topology.ring(dist.get_world_size())
    if hook == "gossip_parameters":
        state = hooks.GossipParametersState(ddp, graph)
        ddp.register_comm_hook(state, hooks.gossip_parameters_hook)
    elif hook == "neighbor_allreduce":
        state = hooks.NeighborAllreduceState(ddp, graph)
        ddp.register_comm_hook(state, hooks.neighbor_allreduce_hook)
    else:
        ddp.register_comm_hook(hooks.ByteGradState(ddp), hooks.bytegrad_hook)


def _train(model, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.5)
    for step in range(_STEPS):
        optimizer.zero_grad()
        x, y = (part.to(device) for part in batch_of(dist.get_rank(), step))
        (model(x) - y).square().mean().backward()
        optimizer.step()


@grouped
def hooked(hook):
    """Parameters after some steps by a hook, on the device that the backend serves."""
    device = _gpu() if dist.get_backend() == "nccl" else torch.device("cpu")
    ddp = DistributedDataParallel(make_model().to(device), bucket_cap_mb=SMALL)
    _register(ddp, hook)
    _train(ddp, device)
    return flat(ddp).cpu()


@grouped
def sharded():
    """Parameters after some steps, by FSDP2 on GPUs and by DDP on the host."""
    from torch.distributed.fsdp import fully_shard

    device, whole = _gpu(), DistributedDataParallel(make_model())
    _train(whole, torch.device("cpu"))
    model = make_model().to(device)
    fully_shard(model, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    _train(model, device)
    found = [one.detach().full_tensor().reshape(-1) for one in model.parameters()]
    return torch.cat(found).cpu(), flat(whole)
