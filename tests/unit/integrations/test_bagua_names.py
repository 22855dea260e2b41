"""Bagua's names that do not depend on its algorithms: the same paths, arguments and defaults."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest
import torch

import asyncddp as bf
import asyncddp.integrations.bagua.torch_api as bagua
from tests.support import RUN_LIMIT

ROOT = "asyncddp.integrations.bagua.torch_api"
NAMES = {
    "": "init_process_group is_initialized get_rank get_world_size get_local_rank get_local_size "
    "get_node_rank algorithms checkpoint contrib with_bagua bagua_init DistributedAlgorithm "
    "BaguaModule BaguaTensor new_group from_torch_group ReduceOp allreduce allreduce_inplace",
    ".env": "get_rank get_world_size get_local_rank get_local_size get_node_rank",
    ".communication": "init_process_group is_initialized new_group from_torch_group ReduceOp send "
    "recv broadcast broadcast_coalesced broadcast_object reduce reduce_inplace allreduce "
    "allreduce_inplace allreduce_coalesced_inplace allgather allgather_inplace gather "
    "gather_inplace scatter scatter_inplace reduce_scatter reduce_scatter_inplace alltoall "
    "alltoall_inplace alltoall_v barrier BaguaProcessGroup",
    ".distributed": "bagua_init ModelSwitchWrapper DistributedModule Reducer OverlappingWrapper "
    "broadcast_parameters allreduce_parameters DistributedAlgorithm BaguaModule",
    ".data_parallel": "DistributedDataParallel BaguaDistributedDataParallel",
    ".data_parallel.bagua_distributed": "BaguaDistributedDataParallel",
    ".tensor": "BaguaTensor",
    ".bucket": "BaguaBucket",
    ".contrib": "fuse_optimizer SyncBatchNorm LoadBalancingDistributedSampler "
    "LoadBalancingDistributedBatchSampler",
    ".contrib.load_balancing_data_loader": "LoadBalancingDistributedSampler "
    "LoadBalancingDistributedBatchSampler",
    ".contrib.fuse.optimizer": "fuse_optimizer is_fused_optimizer",
    ".contrib.sync_batchnorm": "SyncBatchNorm",
    ".algorithms": "q_adam Algorithm AlgorithmImpl gradient_allreduce bytegrad decentralized "
    "async_model_average GlobalAlgorithmRegistry",
    ".algorithms.base": "Algorithm AlgorithmImpl",
    ".algorithms.gradient_allreduce": "GradientAllReduceAlgorithm",
    ".algorithms.bytegrad": "ByteGradAlgorithm",
    ".algorithms.decentralized": "DecentralizedAlgorithm LowPrecisionDecentralizedAlgorithm",
    ".algorithms.async_model_average": "AsyncModelAverageAlgorithm",
    ".algorithms.q_adam": "QAdamOptimizer QAdamAlgorithm",
    ".checkpoint": "save_checkpoint load_checkpoint",
}
SIGNATURES = {
    "init_process_group": "store=None, rank=-1, world_size=-1, local_world_size=-1",
    "with_bagua": "model, optimizers, algorithm, process_group=None, do_flatten=True",
    "bagua_init": "module, optimizer, distributed_algorithm=<DistributedAlgorithm."
    "GradientAllReduce: 'allreduce'>, broadcast_buffers=True, delay_reduce=False, "
    "hierarchical_reduce=None, message_size=10000000, **kwargs",
    "algorithms.gradient_allreduce.GradientAllReduceAlgorithm": "hierarchical=False, average=True",
    "algorithms.bytegrad.ByteGradAlgorithm": "hierarchical=True, average=True",
    "algorithms.decentralized.DecentralizedAlgorithm": "hierarchical=True, "
    "peer_selection_mode='all', communication_interval=1",
    "algorithms.decentralized.LowPrecisionDecentralizedAlgorithm": "hierarchical=True, "
    "communication_interval=1",
    "algorithms.q_adam.QAdamAlgorithm": "q_adam_optimizer, hierarchical=True",
    "algorithms.async_model_average.AsyncModelAverageAlgorithm": "peer_selection_mode='all', "
    "sync_interval_ms=500, warmup_steps=0",
    "contrib.fuse_optimizer": "opt, do_flatten=True, check_flatten=True, *, elementwise=False",
    "contrib.LoadBalancingDistributedSampler": "dataset, complexity_fn, num_replicas=None, "
    "rank=None, shuffle=True, seed=0, drop_last=False, random_level=0.0",
    "contrib.LoadBalancingDistributedBatchSampler": "sampler, batch_fn, drop_last=False",
    "algorithms.q_adam.QAdamOptimizer": "params, lr=0.001, warmup_steps=100, betas=(0.9, 0.999), "
    "eps=1e-08, weight_decay=0.0, *, freeze_bias_correction=False, decoupled_weight_decay=False, "
    "grad_holds_momentum=True",
    "checkpoint.save_checkpoint": "iteration, checkpoints_path, model, optimizer=None, "
    "lr_scheduler=None, *, per_rank=False",
    "checkpoint.load_checkpoint": "checkpoints_path, model, optimizer=None, lr_scheduler=None, "
    "strict=True",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_are_where_bagua_has_them(module):
    """Each is exported by the module of Bagua's path, with words that say what it is."""
    found = importlib.import_module(ROOT + module)
    assert set(NAMES[module].split()) <= set(found.__all__)
    assert [name for name in found.__all__ if not inspect.getdoc(getattr(found, name))] == []


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_and_defaults(path):
    """As Bagua has them, by name and by place; further ones by name alone."""
    found = bagua
    for name in path.split("."):
        found = getattr(found, name)
    parameters = inspect.signature(found).parameters.values()
    bare = [item.replace(annotation=inspect.Parameter.empty) for item in parameters]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[path]})"


def test_what_everybody_may_use_is_the_librarys_own():
    """The names lead to the library's classes, of which there are no others."""
    assert bagua.contrib.fuse_optimizer is bf.fuse_optimizer
    assert bagua.contrib.LoadBalancingDistributedSampler is bf.LoadBalancingDistributedSampler
    assert bagua.algorithms.q_adam.QAdamOptimizer is bf.QAdamOptimizer


def numbers():
    """What a rank is told of itself."""
    sizes = bagua.get_world_size(), bagua.get_local_size()
    return bagua.get_rank(), bagua.get_local_rank(), bagua.get_node_rank(), *sizes


def test_ranks_of_a_world():
    """Rank, rank on the node, node, and how many there are of each."""
    with bf.local_world(4, ranks_per_machine=2) as world:
        got = world.run(numbers)
    assert got == [(0, 0, 0, 4, 2), (1, 1, 0, 4, 2), (2, 0, 1, 4, 2), (3, 1, 1, 4, 2)]


@pytest.mark.parametrize(
    "variables",
    [
        {
            "RANK": "3",
            "LOCAL_RANK": "1",
            "NODE_RANK": "1",
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
        },
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "NODE_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
    ],
)
def test_before_the_world_is_joined_the_launchers_variables_say(variables, monkeypatch):
    """Scripts choose their GPU before ``init_process_group()``; without a launcher there is one."""
    assert numbers() == (0, 0, 0, 1, 1)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert numbers() == (3, 1, 1, 4, 2)


def test_the_world_is_joined_once():
    """A second call raises, and so does what the launcher did not start."""
    assert not bagua.is_initialized()
    with pytest.raises(bf.ArgumentError, match=r"argument store: .* through MPI, got object"):
        bagua.init_process_group(store=object())

    def case():
        bagua.init_process_group(None, bf.rank(), 2, 2)
        assert bagua.is_initialized()
        for name in ("rank", "world_size", "local_world_size"):
            with pytest.raises(bf.ArgumentError, match=rf"argument {name}: .* or -1, .* got 7"):
                bagua.init_process_group(**{name: 7})

    with bf.local_world(2) as world:
        world.run(case)


@pytest.mark.launches
def test_a_second_call_raises():
    """In a process of its own, which has joined no world before."""
    code = (
        "import asyncddp as bf, asyncddp.integrations.bagua.torch_api as bagua\n"
        "bagua.init_process_group(world_size=1)\n"
        "try: bagua.init_process_group()\n"
        "except bf.UsageError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=RUN_LIMIT, check=True
    )
    assert done.stdout == "init_process_group: it was called before; call it once on each rank\n"


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("contrib", "CachedDataset", "Redis server; read them from a local file"),
        ("contrib.cache_loader", "CacheLoader", "Redis server"),
        ("model_parallel.moe", "MoE", "an attribute expert=True"),
    ],
)
def test_names_that_are_missing_say_what_there_is(module, name, words):
    """An import error in words; other names are unknown as ever."""
    found = importlib.import_module(f"{ROOT}.{module}")
    with pytest.raises(ImportError, match=words):
        getattr(found, name)
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        _ = found.Other


def test_a_fused_optimizer_is_known():
    """Algorithms that cannot live with one ask."""
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    fuse = importlib.import_module(f"{ROOT}.contrib.fuse.optimizer")
    assert not fuse.is_fused_optimizer(optimizer)
    assert fuse.is_fused_optimizer(fuse.fuse_optimizer(optimizer))
