"""All communication hooks that torch offers run over the backends, and resume with their state.

PowerSGD makes collectives in callbacks, whose order among several buckets is open with gloo, so it
has one bucket here. The quantization hooks of torch serve CUDA alone.
"""

from __future__ import annotations

import io
import logging
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)

import asyncddp as bf
from tests.support import on
from tests.support.ddp_training import (
    BACKENDS,
    LR,
    Replica,
    Simulation,
    flat,
    grouped,
    loss_of,
    make_ddp,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, which they import
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.distributed.optim.functional_sgd import _FunctionalSGD

HALF, END = 3, 6
backends = pytest.mark.parametrize("backend", BACKENDS)


def bf16_hook(group, bucket):
    """``bf16_compress_hook``, which DDP registers by that name where there is CUDA alone."""
    return default_hooks.bf16_compress_hook(group, bucket)


def bf16_wrapper(group, bucket):
    """The same with ``bf16_compress_wrapper``."""
    return default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)(group, bucket)


def fp16_wrapper(group, bucket):
    """``fp16_compress_wrapper``, as a function that pickle finds."""
    return default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)(group, bucket)


def fp16_power_sgd(state, bucket):
    """PowerSGD whose factors travel in halves."""
    return default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)(state, bucket)


def batched_power_sgd(state, bucket):
    """``batched_powerSGD_hook``, whose matrices torch itself refuses, as they are no batch."""
    orthogonalize = powerSGD_hook._orthogonalize

    def of_one(matrix, epsilon=0):
        orthogonalize(matrix if matrix.dim() == 3 else matrix[None], epsilon)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(powerSGD_hook, "_orthogonalize", of_one)
        future = powerSGD_hook.batched_powerSGD_hook(state, bucket)
        future.wait()  # its callbacks look the function up
    return future


def power_sgd_state():
    """One that compresses from the third step on."""
    return powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)


AVERAGES = {
    "allreduce": (default_hooks.allreduce_hook, 1e-6),
    "fp16": (default_hooks.fp16_compress_hook, 2e-3),
    "bf16": (bf16_hook, 2e-2),
    "fp16 wrapper": (fp16_wrapper, 2e-3),
    "bf16 wrapper": (bf16_wrapper, 2e-2),
}
STATEFUL = {
    "power_sgd": powerSGD_hook.powerSGD_hook,
    "batched_power_sgd": batched_power_sgd,
    "fp16 power_sgd": fp16_power_sgd,
}


def mean(step, gradients):
    return [torch.stack(gradients).mean(0)] * len(gradients)


@grouped
def averages(name):
    hook, tolerance = AVERAGES[name]
    ddp = make_ddp()
    ddp.register_comm_hook(None, hook)
    trained = Replica(ddp).train(0, END)
    expected = Simulation(bf.size(), mean).train(0, END)
    for mine, all_ranks in zip(trained, expected, strict=True):
        torch.testing.assert_close(mine, all_ranks[0], rtol=0, atol=tolerance)
    return trained[-1]


@pytest.mark.exhaustive
@on("mpi-4")
@backends
@pytest.mark.parametrize("name", AVERAGES)
def test_averages_are_as_simulated(world, backend, tmp_path, name):
    """allreduce, fp16 and bf16, by hooks and by wrappers; replicas stay equal."""
    ends = world.run(averages, backend, str(tmp_path), name)
    assert all(torch.equal(ends[0], end) for end in ends)


@grouped
def resumes(name):
    ddp, state = make_ddp(bucket_cap_mb=25), power_sgd_state()
    ddp.register_comm_hook(state, STATEFUL[name])
    replica = Replica(ddp)
    replica.train(0, HALF)
    file = io.BytesIO()
    parts = {"model": ddp.state_dict(), "optimizer": replica.optimizer.state_dict()}
    torch.save({**parts, "comm_hook": STATEFUL[name], "comm_hook_state": state}, file)
    expected = replica.train(HALF, END)
    assert state.error_dict[0].abs().max() > 0

    file.seek(0)
    logging.getLogger(powerSGD_hook.__name__).setLevel(logging.ERROR)
    saved = torch.load(file, weights_only=False)
    again, state = Replica(make_ddp(bucket_cap_mb=25)), saved["comm_hook_state"]
    again.ddp.register_comm_hook(state, saved["comm_hook"])
    done, state.iter = state.iter, 0  # one pass without compression, after which DDP arranges
    loss_of(again.ddp, bf.rank(), 0).backward()  # its buckets as those of the state
    state.iter = done
    again.ddp.load_state_dict(saved["model"])
    again.optimizer.load_state_dict(saved["optimizer"])
    found = again.train(HALF, END)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    return found[-1]


@on("mpi-2")
@backends
@pytest.mark.parametrize("name", STATEFUL)
def test_stateful_hooks_resume_alike(world, backend, tmp_path, name):
    """As torch's documentation saves them: state and hook in the checkpoint, the same ending."""
    first, second = world.run(resumes, backend, str(tmp_path), name)
    assert torch.equal(first, second)


@grouped
def post_local(hierarchical):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[bf.rank() // 2]

    def begin():
        ddp = make_ddp()
        state = post_localSGD_hook.PostLocalSGDState(None, mine, start_localSGD_iter=2)
        ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        if hierarchical:
            averager = HierarchicalModelAverager({2: 2, 4: 4}, warmup_steps=2)
        else:
            averager = PeriodicModelAverager(period=2, warmup_steps=2)
        return state, Replica(
            ddp, lambda p: PostLocalSGDOptimizer(torch.optim.SGD(p, lr=LR), averager)
        )

    state, replica = begin()
    replica.train(0, HALF)
    saved = {
        "model": {key: one.clone() for key, one in replica.ddp.state_dict().items()},
        "optimizer": replica.optimizer.state_dict(),
        "iter": state.iter,
    }
    expected = replica.train(HALF, END)
    state, again = begin()
    state.iter = saved["iter"]
    again.ddp.load_state_dict(saved["model"])
    again.optimizer.load_state_dict(saved["optimizer"])
    found = again.train(HALF, END)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    return found


@on("mpi-4")
@backends
@pytest.mark.parametrize("hierarchical", [False, True])
def test_post_local_sgd_resumes_alike(world, backend, tmp_path, hierarchical):
    """Pairs average gradients, all ranks or pairs average parameters now and then."""
    ends = world.run(post_local, backend, str(tmp_path), hierarchical)
    assert torch.equal(ends[0][-1], ends[1][-1])
    assert not torch.equal(ends[0][0], ends[2][0])


@grouped
def noop():
    ddp = make_ddp()
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    trained = Replica(ddp).train(0, END)
    expected = Simulation(bf.size()).train(0, END)
    for mine, all_ranks in zip(trained, expected, strict=True):
        torch.testing.assert_close(mine, all_ranks[bf.rank()], rtol=0, atol=1e-6)


@on("mpi-2")
@backends
def test_noop_trains_each_rank_alone(world, backend, tmp_path):
    """Nothing is averaged."""
    world.run(noop, backend, str(tmp_path))


@grouped
def overlaps():
    ddp = make_ddp()
    parameters = list(ddp.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, which nobody asked
        functional = _FunctionalSGD(parameters, LR, momentum=0.5)
    overlapped = optimizer_overlap_hooks._OptimizerHookState(functional)
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, overlapped)
    ddp.register_comm_hook(None, hook)
    for step in range(END):
        ddp.zero_grad()
        loss_of(ddp, bf.rank(), step).backward()
    found = flat(ddp)
    expected = Simulation(bf.size(), mean).train(0, END)[-1][0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@on("mpi-2")
@backends
def test_the_optimizer_overlaps_with_backward(world, backend, tmp_path):
    """Each bucket is stepped as soon as its average is there."""
    world.run(overlaps, backend, str(tmp_path))


@grouped
def by_type():
    ends = {}
    for kind in DDPCommHookType:
        if kind.name.startswith("QUANTIZE"):
            continue  # CUDA alone
        ddp = make_ddp(bucket_cap_mb=25)
        if kind is DDPCommHookType.BF16_COMPRESS and torch.version.cuda is None:
            with pytest.raises(TypeError, match="BF16 all reduce communication hook"):
                register_ddp_comm_hook(kind, ddp)
            continue
        register_ddp_comm_hook(kind, ddp)
        ends[kind.name] = Replica(ddp).train(0, 2)[-1]
    return ends


@on("mpi-2")
@backends
def test_hooks_by_type(world, backend, tmp_path):
    """``DDPCommHookType`` registers each; all but ``NOOP`` keep the replicas equal."""
    first, second = world.run(by_type, backend, str(tmp_path))
    assert {"ALLREDUCE", "FP16_COMPRESS", "POWER_SGD", "BATCHED_POWER_SGD_RANK2"} < set(first)
    alike = {name for name, end in first.items() if torch.equal(end, second[name])}
    assert alike == set(first) - {"NOOP"}
