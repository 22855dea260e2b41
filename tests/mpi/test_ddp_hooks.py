"""The hooks for DDP do on ranks what their formulas say, step by step, as in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import asyncddp as bf
from asyncddp import hooks, topology
from tests.support import gradient_pieces, on
from tests.support.ddp_training import (
    BACKENDS,
    Replica,
    Simulation,
    flat,
    grouped,
    loss_of,
    make_ddp,
    make_model,
)
from tests.support.gradient_pieces import InPieces

STEPS = 5
GRAPHS = {
    "ring": topology.ring,
    "one-way": lambda n: topology.ring(n, style="right"),
    "one_peer": topology.one_peer_exponential,
    "star": lambda n: topology.metropolis_weights(topology.star(n)),
    "complete": topology.complete,
}
HOOKS = {
    "gradients": (hooks.NeighborAllreduceState, hooks.neighbor_allreduce_hook),
    "parameters": (hooks.GossipParametersState, hooks.gossip_parameters_hook),
}
MODES = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "one bucket": {"bucket_cap_mb": 25},
}
backends = pytest.mark.parametrize("backend", BACKENDS)


def mixing(graph):
    """What averages rows of all ranks in a round, by the matrix."""
    schedule = topology.as_schedule(graph)

    def mix(step, rows):
        w = torch.as_tensor(topology.mixing_matrix(schedule, step), dtype=torch.float64)
        return list((w @ torch.stack(rows).double()).float())

    return mix


def simulated(what, graph):
    """The simulation of one of :data:`HOOKS`."""
    which = "average" if what == "gradients" else "mix"
    return Simulation(bf.size(), **{which: mixing(graph)})


@grouped
def trains_as_simulated(what, name, options):
    graph = GRAPHS[name](bf.size())
    ddp = make_ddp(**options)
    state, hook = HOOKS[what]
    ddp.register_comm_hook(state(ddp, graph), hook)
    trained = Replica(ddp).train(0, STEPS)
    expected = simulated(what, graph).train(0, STEPS)
    for mine, all_ranks in zip(trained, expected, strict=True):
        torch.testing.assert_close(mine, all_ranks[bf.rank()], rtol=0, atol=1e-6)
    return trained[-1]


@on("mpi-4")
@backends
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("what", HOOKS)
def test_gossip_is_what_the_matrix_says(world, backend, tmp_path, what, name):
    """Each rank has after every step what ``W`` gives it, for graphs and schedules."""
    ends = world.run(trains_as_simulated, backend, str(tmp_path), what, name, {})
    alike = torch.equal(ends[0], ends[1])
    assert alike is (what == "gradients" and name == "complete")


@on("mpi-2")
@backends
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", HOOKS)
def test_gossip_in_every_mode_of_ddp(world, backend, tmp_path, what, mode):
    """The same with a static graph, unused parameters, gradients as views, and one bucket."""
    world.run(trains_as_simulated, backend, str(tmp_path), what, "one_peer", MODES[mode])


@grouped
def adds_pieces(what, kind):
    make, hook = HOOKS[what]

    def trained(nested):
        ddp = DistributedDataParallel(
            InPieces(kind, nested=nested), static_graph=True, bucket_cap_mb=1e-4
        )
        ddp.register_comm_hook(make(ddp, topology.complete(bf.size())), hook)
        sgd = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(STEPS):
            sgd.zero_grad()
            gradient_pieces.loss_of(ddp, bf.rank(), step).backward()
            sgd.step()
        return flat(ddp)

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-10, atol=1e-10)


@on("mpi-2")
@backends
@pytest.mark.parametrize("kind", ["shared", "mixed", "reversible"])
@pytest.mark.parametrize("what", HOOKS)
def test_gradients_in_pieces(world, backend, tmp_path, what, kind):
    """A static graph may have backward passes inside of a pass, whose pieces DDP adds up."""
    world.run(adds_pieces, backend, str(tmp_path), what, kind)


@grouped
def accumulates():
    ddp = make_ddp()
    state = hooks.GossipParametersState(ddp, topology.complete(bf.size()))
    ddp.register_comm_hook(state, hooks.gossip_parameters_hook)
    with torch.no_grad():
        for one in ddp.parameters():
            one.add_(bf.rank())
    before = flat(ddp)
    with ddp.no_sync():
        loss_of(ddp, bf.rank(), 0).backward()
    assert torch.equal(flat(ddp), before)
    assert state.step == 0
    first = [one.grad.clone() for one in ddp.parameters()]
    loss_of(ddp, bf.rank(), 0).backward()
    torch.testing.assert_close(flat(ddp), before - bf.rank() + (bf.size() - 1) / 2)
    for one, grad in zip(ddp.parameters(), first, strict=True):
        torch.testing.assert_close(one.grad, 2 * grad)
    assert state.step == 1


@on("mpi-2")
@backends
def test_no_sync_communicates_nothing(world, backend, tmp_path):
    """Under ``no_sync()`` gradients are added up, and parameters stay; then they are averaged."""
    world.run(accumulates, backend, str(tmp_path))


@grouped
def keeps_buffers():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    state = hooks.GossipParametersState(ddp, topology.complete(bf.size()))
    ddp.register_comm_hook(state, hooks.gossip_parameters_hook)
    for step in range(2):
        ddp(torch.full((3, 4), float(bf.rank())) + torch.randn(3, 4)).sum().backward()
        assert step == state.step - 1
    return ddp.module[1].running_mean.clone()


@on("mpi-2")
@backends
def test_buffers_stay_each_ranks_own(world, backend, tmp_path):
    """Where replicas differ, rank 0's buffers no longer overwrite those of the others."""
    first, second = world.run(keeps_buffers, backend, str(tmp_path))
    assert not torch.allclose(first, second)


@grouped
def halves():
    ddp = make_ddp()
    state = hooks.NeighborAllreduceState(ddp, topology.complete(bf.size()))
    ddp.register_comm_hook(state, fp16_compress_wrapper(hooks.neighbor_allreduce_hook))
    loss_of(ddp, bf.rank(), 0).backward()
    found = torch.cat([one.grad.reshape(-1) for one in ddp.parameters()])
    assert found.dtype is torch.float32
    assert torch.equal(found, found.half().float())
    gradients = []
    for rank in range(bf.size()):
        model = make_model()
        loss_of(model, rank, 0).backward()
        gradients.append(torch.cat([one.grad.reshape(-1) for one in model.parameters()]))
    torch.testing.assert_close(found, torch.stack(gradients).mean(0), rtol=2e-3, atol=1e-4)


@on("mpi-2")
@backends
def test_torchs_wrappers_take_our_hooks(world, backend, tmp_path):
    """``fp16_compress_wrapper`` around a hook of ours sends halves."""
    world.run(halves, backend, str(tmp_path))


@grouped
def spreads():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = make_ddp(process_group=pairs[bf.rank() // 2])
    state = hooks.GossipParametersState(ddp, topology.complete(2))
    ddp.register_comm_hook(state, hooks.gossip_parameters_hook)
    with torch.no_grad():
        for one in ddp.parameters():
            one.fill_(bf.rank())
    loss_of(ddp, bf.rank(), 0).backward()
    assert torch.equal(flat(ddp).unique(), torch.tensor([0.5 if bf.rank() < 2 else 2.5]))


@on("mpi-4")
@backends
def test_a_modules_own_group_is_used(world, backend, tmp_path):
    """The graph's ranks are those of the module's process group."""
    world.run(spreads, backend, str(tmp_path))


@grouped
def joins(what):
    ddp = make_ddp()
    if what == "bytegrad":
        ddp.register_comm_hook(hooks.ByteGradState(ddp), hooks.bytegrad_hook)
    else:
        state, hook = HOOKS[what]
        ddp.register_comm_hook(state(ddp, topology.complete(bf.size())), hook)
    replica = Replica(ddp)
    with Join([ddp]):
        replica.train(0, 3 + 2 * bf.rank())
    return flat(ddp)


@on("mpi-2")
@backends
@pytest.mark.parametrize("what", [*HOOKS, "bytegrad"])
def test_ranks_with_fewer_batches_join(world, backend, tmp_path, what):
    """Under torch's ``Join`` a rank without data goes on to exchange; DDP then has one model."""
    first, second = world.run(joins, backend, str(tmp_path), what)
    assert first.isfinite().all()
    assert torch.equal(first, second)
