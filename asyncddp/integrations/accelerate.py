"""Training by any of asyncddp's algorithms in scripts that use Hugging Face's accelerate.

::

    from accelerate import Accelerator
    from asyncddp.integrations.accelerate import prepare

    accelerator = Accelerator()
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

For the Trainer of transformers there is :mod:`asyncddp.integrations.hugging_face`.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from asyncddp.algorithms import Algorithm
from asyncddp.checkpoint import load_checkpoint, save_checkpoint
from asyncddp.checkpoint.trainable_part import TrainablePart
from asyncddp.checkpoint.training_state import compact
from asyncddp.context import current, init
from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.optim.average_models import average_model
from asyncddp.optim.distributed_optimizer import DistributedOptimizer

__all__ = ["prepare"]

FOLDER = "asyncddp"
"""Folder, inside one of Hugging Face's checkpoints, of a checkpoint of all ranks."""


def prepare(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *others: Any,
    algorithm: str | type[Algorithm] = "adapt_then_combine",
    topology: Any = None,
    **arguments: Any,
) -> tuple[Any, ...]:
    """Prepare objects as ``accelerator.prepare`` does, with an optimizer that averages over ranks.

    The model is moved to its device, with mixed precision, but not wrapped in
    ``DistributedDataParallel``; ``accelerator.accumulate(model)`` defers averaging. The call joins
    the world, and is collective. From then on ``accelerator.save_state`` saves the average model,
    and beside it each rank's own model and optimizer, which ``accelerator.load_state`` restores; if
    the number of ranks has changed, all ranks continue from the average. All ranks call both,
    between two steps. Call it once for each model that is trained.

    Args:
        accelerator: The ``accelerate.Accelerator``.
        model: The module.
        optimizer: The optimizer of its parameters, which is wrapped by
            :class:`asyncddp.DistributedOptimizer`.
        *others: Data loaders, schedulers and other objects for ``accelerator.prepare``.
        algorithm: Name of a method, or a subclass of ``asyncddp.algorithms.Algorithm``.
        topology: Graph or schedule of ranks, a function that makes it for their number, or its
            name; None for the world's.
        **arguments: Other arguments of :class:`asyncddp.DistributedOptimizer`.

    Returns:
        The model, the optimizer and the others, prepared.

    Raises:
        ArgumentError: The accelerator splits models between processes, as DeepSpeed and FSDP do,
            or an argument of the optimizer cannot be.
        EnvironmentProblem: accelerate knows of another world.

    Example:
        >>> from accelerate import Accelerator
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = prepare(Accelerator(cpu=True), model, optimizer)
        >>> optimizer.optimizer.algorithm
        'adapt_then_combine'
        >>> import asyncddp as bf
        >>> bf.shutdown()
    """
    leave_unwrapped(accelerator, "prepare")
    prepared = accelerator.prepare_model(model)
    arguments |= {"algorithm": algorithm, "topology": topology}
    distributed = DistributedOptimizer(optimizer, model, **arguments)
    _hold_back(accelerator, prepared, distributed)
    _save_replicas(accelerator, prepared, TrainablePart(model), distributed)
    rest = accelerator.prepare(distributed, *others)
    return (prepared, *(rest if others else (rest,)))


def leave_unwrapped(accelerator: Any, caller: str) -> None:
    """Join the world, and keep an accelerator of the same world from wrapping models in DDP.

    Parameters are views of buckets, and accelerate would save only one view of each bucket: saved
    tensors therefore get their own memory.
    """
    kind, sizes = accelerator.distributed_type.value, accelerator.parallelism_config
    if sizes is not None and sizes.non_data_parallel_size * sizes.dp_shard_size > 1:
        kind = repr(sizes)
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ArgumentError(
            f"{caller}: expected an accelerator that leaves each rank a whole model, got {kind}, "
            "which splits or wraps it; leave out --use_deepspeed, --use_fsdp and their like, in "
            "TrainingArguments too, or train by accelerate alone"
        )
    init()
    here, there = current(), (accelerator.process_index, accelerator.num_processes)
    if (here.rank, here.size) != there:
        remedy = (
            "start the script by asyncddp run, torchrun or accelerate launch, which tell both the "
            "same"
        )
        if accelerator.device.type == "cpu" and not getattr(accelerator.state, "_cpu", True):
            remedy = (
                "without a GPU it joins other processes only with Accelerator(cpu=True), or with "
                "TrainingArguments(use_cpu=True)"
            )
        raise EnvironmentProblem(
            f"{caller}: this process is rank {here.rank} of {here.size}, and process {there[0]} of "
            f"{there[1]} to accelerate: {remedy}"
        )
    plain = accelerator.get_state_dict
    accelerator.get_state_dict = lambda *args, **kwargs: compact(plain(*args, **kwargs))
    accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)


def _hold_back(accelerator: Any, model: Any, distributed: DistributedOptimizer) -> None:
    """Make accelerate's gradient accumulation count as one backward pass of the model."""
    before = accelerator.no_sync

    def no_sync(accumulated: Any) -> AbstractContextManager[None]:
        own = accumulated is model
        held: AbstractContextManager[None] = distributed.no_sync() if own else before(accumulated)
        return held

    accelerator.no_sync = no_sync


def _save_replicas(
    accelerator: Any, model: Any, part: TrainablePart, distributed: DistributedOptimizer
) -> None:
    """Make an accelerator's checkpoints hold the average model, and each rank's own beside it.

    accelerate loads an optimizer after the models; each rank's own state is loaded after that.
    """
    due: list[Path] = []
    stand_in = SimpleNamespace(
        state_dict=lambda: compact(model.state_dict()), load_state_dict=model.load_state_dict
    )

    def folder(models: list[Any], place: str | os.PathLike[str]) -> Path:
        number = models.index(model)
        return Path(place, f"{FOLDER}_{number}" if number else FOLDER)

    def save(models: list[Any], weights: list[Any], place: str) -> None:
        distributed.abort()
        save_checkpoint(folder(models, place), part, distributed, replicas="all", keep=1)
        with average_model(part):
            weights[models.index(model)] = compact(model.state_dict(), copies=True)
        distributed.resume()

    def load(models: list[Any], place: str) -> None:
        due.append(folder(models, place))
        models[models.index(model)] = stand_in

    def load_own(_: Any) -> None:
        if due:
            load_checkpoint(due.pop(), part, distributed)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    distributed.register_load_state_dict_post_hook(load_own)
