"""Local parts: what a bucket holds of a parameter, and where FSDP2 reads it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import asyncddp as bf
from asyncddp.tensors import fsdp_params
from asyncddp.tensors.buckets import ParameterBucket, partition
from asyncddp.tensors.local_parts import (
    fitted,
    is_distributed,
    is_movable,
    local,
    local_grad,
    reshard,
    set_local,
    shard,
)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_ordinary_tensor_is_its_own_part() -> None:
    """Without gradients, in the same memory; and it can be given other memory."""
    parameter = nn.Parameter(torch.ones(2, 3))
    assert not is_distributed(parameter)
    assert shard(parameter) is parameter
    assert local_grad(parameter) is None
    assert local(parameter).data_ptr() == parameter.data_ptr()
    view = torch.zeros(2, 3)
    set_local(parameter, view)
    assert parameter.data_ptr() == view.data_ptr()


def test_the_part_of_a_dtensor_moves(group: None) -> None:
    """Its local tensor lies in other memory then, and its gradient has a local part."""
    mesh = init_device_mesh("cpu", (1,))
    parameter = nn.Parameter(distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]))
    view = local(parameter).clone()
    set_local(parameter, view)
    view.mul_(2)
    assert is_distributed(parameter)
    assert torch.equal(parameter.full_tensor(), 2 * torch.arange(6.0).view(3, 2))
    (parameter * 3).sum().backward()
    assert isinstance(parameter.grad, DTensor)
    assert torch.equal(local_grad(parameter), torch.full((3, 2), 3.0))


@pytest.mark.parametrize("known", [True, False])
def test_fsdp2_reads_what_a_bucket_holds(
    group: None, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where its names are known; by ``write()`` where they are not."""
    if not known:
        monkeypatch.setattr(fsdp_params, "_FLAT", "_another_name")
    model = fully_shard(nn.Linear(2, 3, bias=False), mesh=init_device_mesh("cpu", (1,)))
    fsdp_params.register([model])
    assert is_movable(model.weight) is known
    with torch.no_grad():
        bucket = ParameterBucket(list(model.named_parameters()))
        bucket.flat.fill_(2.0)
        bucket.write()
    assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 3), 4.0))
    reshard([model])  # a root stays gathered after forward
    assert bucket.detached_indices() == []
    with torch.no_grad():
        shard(model.weight).fill_(5.0)
        assert bucket.reattach()
    assert torch.equal(bucket.views[0], torch.full((3, 2), 5.0))


def test_padding_is_no_part_of_a_shard() -> None:
    """A view is cut where a shard ends, along any dimension, and else is the view itself."""
    view = torch.zeros(3, 4)
    assert fitted(view, torch.zeros(3, 4)) is view
    assert fitted(view, torch.zeros(1, 4)).shape == (1, 4)
    assert fitted(view, torch.zeros(3, 2)).shape == (3, 2)
    stacked = torch.zeros(5, 3, 4)
    assert fitted(stacked, torch.zeros(3, 4)) is stacked


def test_kinds_are_in_different_buckets() -> None:
    """Parameters of which other ranks have copies are averaged apart from all others."""
    tensors = [torch.zeros(2)] * 4
    assert partition(tensors, 1 << 10, kinds=[0, 1, 0, 1]) == [[0, 2], [1, 3]]


def test_one_replica_of_one_rank_trains_as_plain_torch(group: None) -> None:
    """With one process, a mesh changes nothing, and all that takes it works."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replica", "shard"))
    x, results = torch.ones(4, 2), []
    bf.init(transport="loopback")
    try:
        for averaged in (False, True):
            torch.manual_seed(0)
            model = fully_shard(nn.Linear(2, 3), mesh=mesh["shard"])
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            if averaged:
                optimizer = bf.DistributedOptimizer(
                    optimizer, model, "diloco", mesh=mesh["replica"], communication_interval=100
                )
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
            results.append(model.weight.full_tensor().detach().clone())
        assert bf.consensus_distance(model, mesh=mesh["replica"]) == 0.0
        with bf.replicas(mesh["replica"]) as context, bf.average_model(model):
            assert (context.rank, bf.size()) == (0, 1)
    finally:
        bf.shutdown()
    assert torch.equal(*results)
