"""Compressed averages in DDP are what compressors, error memories and parts give in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import asyncddp as bf
from asyncddp import hooks, topology
from asyncddp.compression import COMPRESSORS
from tests.support import on
from tests.support.ddp_training import (
    BACKENDS,
    Replica,
    Simulation,
    flat,
    grouped,
    loss_of,
    make_ddp,
    make_model,
    recorded,
)

STEPS = 4
SIZES = [one.numel() for one in make_model().parameters()]
backends = pytest.mark.parametrize("backend", BACKENDS)


def compressor(name):
    options = {"ratio": 0.25} if name in ("top_k", "random_k") else {}
    return COMPRESSORS[name](**options)


def lossy(codec, chunks):
    """What arrives of chunks that are encoded without memory."""
    size = codec.encoded_size(chunks.shape[1], chunks.dtype)
    encoded = torch.empty(len(chunks), size, dtype=torch.uint8)
    codec.encode(chunks.contiguous(), encoded)
    decoded = torch.empty_like(chunks)
    codec.decode(encoded, decoded)
    return decoded


class Reference:
    """Averages by parts, with a memory of what each rank owes in both messages, if any."""

    def __init__(self, codec, layouts, *, memory):
        self.codec, self.layouts, self.memory = codec, layouts, memory
        self.owed = {}

    def send(self, key, chunks):
        owed = self.owed.get(key, torch.zeros_like(chunks)) if self.memory else 0
        arrived = lossy(self.codec, chunks + owed)
        self.owed[key] = chunks + owed - arrived
        return arrived

    def __call__(self, step, gradients):
        n, parts = len(gradients), [torch.split(row, SIZES) for row in gradients]
        means = [torch.zeros(size) for size in SIZES]
        for places in map(tuple, self.layouts[step].values()):
            rows = torch.stack([torch.cat([row[place] for place in places]) for row in parts])
            numel, width = rows.shape[1], -(-rows.shape[1] // n)
            rows = torch.nn.functional.pad(rows, (0, n * width - numel)).view(n, n, width)
            first = torch.stack([self.send((places, rank, 1), rows[rank]) for rank in range(n)])
            mean = [self.send((places, rank, 2), first[:, rank].mean(0)[None]) for rank in range(n)]
            whole = torch.cat(mean, 1)[0, :numel].split([SIZES[place] for place in places])
            for place, part in zip(places, whole, strict=True):
                means[place] = part
        return [torch.cat(means)] * n


@grouped
def trains_as_simulated(name, memory):
    ddp, layouts, codec = make_ddp(), [], compressor(name)
    state = hooks.CompressedAllreduceState(ddp, codec, error_feedback=memory)
    hook = hooks.compressed_allreduce_hook
    if name == "minmax_uint8" and not memory:
        state, hook = hooks.ByteGradState(ddp), hooks.bytegrad_hook
    ddp.register_comm_hook(state, recorded(hook, ddp, layouts))
    trained = Replica(ddp).train(0, STEPS)
    assert len(layouts[-1]) > 1
    reference = Reference(codec, layouts, memory=memory)
    expected = Simulation(bf.size(), reference).train(0, STEPS)
    for mine, all_ranks in zip(trained, expected, strict=True):
        torch.testing.assert_close(mine, all_ranks[bf.rank()], rtol=0, atol=1e-6)
    return trained[-1]


@on("mpi-4")
@backends
@pytest.mark.parametrize(
    ("name", "memory"),
    [("minmax_uint8", False), ("sign", True), ("top_k", True), ("fp16", True), ("bf16", False)],
)
def test_compressed_averages_are_as_simulated(world, backend, tmp_path, name, memory):
    """ByteGrad, sign, top-k and halves, with error feedback and without; replicas stay equal."""
    ends = world.run(trains_as_simulated, backend, str(tmp_path), name, memory)
    assert all(torch.equal(ends[0], end) for end in ends)


@grouped
def trains(name):
    ddp = make_ddp(bucket_cap_mb=25)
    state = hooks.CompressedAllreduceState(ddp, hooks.error_feedback(compressor(name)))
    ddp.register_comm_hook(state, hooks.compressed_allreduce_hook)
    replica, losses = Replica(ddp), []
    for _ in range(60):
        replica.train(0, 1)
        losses.append(float(loss_of(ddp.module, bf.rank(), 0).detach()))
    total = torch.tensor([losses[0], losses[-1]])
    dist.all_reduce(total)
    assert total[1] < 0.75 * total[0], total
    return flat(ddp)


@pytest.mark.nightly
@on("mpi-2")
@backends
@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_trains_with_error_feedback(world, backend, tmp_path, name):
    """Whatever the registry has lowers the loss, and keeps the replicas equal."""
    first, second = world.run(trains, backend, str(tmp_path), name)
    assert torch.equal(first, second)


@grouped
def gossips_compressed():
    ddp = make_ddp()
    graph = topology.ring(bf.size())
    state = hooks.NeighborAllreduceState(ddp, graph, compression="bf16")
    ddp.register_comm_hook(state, hooks.neighbor_allreduce_hook)
    loss_of(ddp, bf.rank(), 0).backward()
    found = torch.cat([one.grad.reshape(-1) for one in ddp.parameters()])
    near, rows = topology.neighbors_of(graph, bf.rank()), []
    for rank in range(bf.size()):
        model = make_model()
        loss_of(model, rank, 0).backward()
        rows.append(torch.cat([one.grad.reshape(-1) for one in model.parameters()]))
    expected = near.self_weight * rows[bf.rank()]
    for peer, weight in near.src_weights.items():
        expected = expected + weight * rows[peer].bfloat16().float()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@on("mpi-4")
@backends
def test_gossip_of_compressed_gradients(world, backend, tmp_path):
    """Neighbours' gradients are rounded on the way, a rank's own are not."""
    world.run(gossips_compressed, backend, str(tmp_path))


@grouped
def overflows(name):
    ddp, layouts, codec = make_ddp(bucket_cap_mb=25), [], compressor(name)
    state = hooks.CompressedAllreduceState(ddp, codec)
    hook = recorded(hooks.compressed_allreduce_hook, ddp, layouts)
    ddp.register_comm_hook(state, hook)
    replica = Replica(ddp)
    replica.train(0, 2)
    replica.optimizer.zero_grad()
    loss = loss_of(ddp, bf.rank(), 2)
    (loss * float("inf") if bf.rank() == 1 else loss).backward()
    gradients = torch.cat([one.grad.reshape(-1) for one in ddp.parameters()])
    assert not gradients.isfinite().all(), "all ranks see the overflow of one"
    trained = replica.train(3, 5)  # the step was skipped, as a GradScaler does
    simulation = Simulation(bf.size(), Reference(codec, layouts, memory=True))
    simulation.train(0, 2)
    simulation.average.owed.clear()
    expected = simulation.train(3, 5)
    for mine, all_ranks in zip(trained, expected, strict=True):
        torch.testing.assert_close(mine, all_ranks[bf.rank()], rtol=0, atol=1e-6)


@on("mpi-2")
@backends
@pytest.mark.parametrize("name", ["sign", "top_k"])
def test_an_overflow_poisons_nothing(world, backend, tmp_path, name):
    """After infinities on one rank all memories begin anew, and training goes on as simulated."""
    world.run(overflows, backend, str(tmp_path), name)
