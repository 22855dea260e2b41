"""Strategy mixin for Fabric, shared by the packages ``lightning`` and ``lightning_fabric``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch

from asyncddp.algorithms import Algorithm
from asyncddp.errors import ArgumentError
from asyncddp.integrations.lightning.checkpoints import (
    KEY,
    described,
    rank_file,
    read,
    shared_model_state,
    shared_optimizer_state,
    write,
)
from asyncddp.integrations.lightning.collectives import reduce_in_place
from asyncddp.integrations.lightning.world_strategy import WorldStrategyMixin, check_shares_nothing
from asyncddp.ops.barrier import barrier
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from asyncddp.optim.parameter_sync import broadcast_parameters


class FabricStrategyMixin(WorldStrategyMixin):
    """Strategy of Lightning's Fabric that trains modules by any of asyncddp's algorithms.

    ``fabric.setup(model, optimizer)`` gives all ranks rank 0's model, and wraps the optimizer by
    :class:`asyncddp.DistributedOptimizer`. Ranks, devices and samplers are those of the world that
    ``asyncddp run``, ``mpirun``, ``srun`` or ``torchrun`` has started; making a strategy joins it.

    Args:
        algorithm, communication, topology, compression, process_group_backend: As of the Trainer's
            :class:`asyncddp.integrations.lightning.AsyncDDPStrategy`.
        replicas: Whose model ``fabric.save`` writes: ``"average"`` of all ranks, ``"rank0"``, or
            ``"all"``: the average, and a file of each rank beside it for as many ranks to resume.
        checkpoint: Another name for ``replicas``, with ``"per_rank"`` for ``"all"``.
        accelerator, parallel_devices, checkpoint_io, precision: As of Lightning's own strategies.
        **options: Other arguments of :class:`asyncddp.DistributedOptimizer`, and options of the
            method.

    Raises:
        UnknownNameError: No method has the name.
        ArgumentError: An invalid argument.
    """

    _caller: ClassVar[str] = "Fabric"

    def __init__(
        self,
        algorithm: str | type[Algorithm] = "adapt_then_combine",
        communication: str | None = None,
        topology: Any = None,
        compression: Any = None,
        *,
        replicas: str = "average",
        process_group_backend: str | None = None,
        checkpoint: str | None = None,
        accelerator: Any = None,
        parallel_devices: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        **options: Any,
    ) -> None:
        arguments = {**options, "communication": communication, "compression": compression}
        self._modules: list[torch.nn.Module] = []
        self.distributed_optimizers: list[DistributedOptimizer] = []
        self._join_world(
            algorithm,
            topology,
            checkpoint or replicas,
            process_group_backend,
            arguments,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._backward_sync_control = self

    # collectives

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        barrier()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, in place."""
        return reduce_in_place(tensor, group, reduce_op)

    # training

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Move a module to this rank's device."""
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Broadcast rank 0's module to all ranks."""
        broadcast_parameters(module)
        self._modules.append(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Wrap an optimizer of modules that were set up before."""
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        owners = [
            module
            for module in self._modules
            if trained & {id(parameter) for parameter in module.parameters()}
        ]
        if not owners:
            raise ArgumentError(
                "AsyncDDPStrategy: fabric.setup_optimizers was given an optimizer of no module "
                "that is set up; call fabric.setup(model, optimizer), or setup_module(model) before"
            )
        former = [one for one in self.distributed_optimizers if not one._closed]
        check_shares_nothing("fabric.setup_optimizers was given", [*former, optimizer])
        wrapped = self._wrapped(optimizer, owners)
        self.distributed_optimizers.append(wrapped)
        return wrapped

    @contextmanager
    def no_backward_sync(self, module: Any, enabled: bool = True) -> Iterator[None]:
        """Accumulate gradients inside a ``with`` block, so that a step counts as one pass."""
        with ExitStack() as stack:
            for optimizer in self.distributed_optimizers if enabled else ():
                stack.enter_context(optimizer.no_sync())
            yield

    # checkpoints

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the module's state for a checkpoint; collective for the average."""
        return shared_model_state(self._replicas, module)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state for a checkpoint; collective for the average."""
        return shared_optimizer_state(self._replicas, optimizer.state_dict())

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002 - Lightning's name
    ) -> None:
        """Write a checkpoint on rank 0, after each rank's own if ``replicas`` is ``"all"``."""
        found = described(self._replicas, self._settings.method_name)
        convert = self._convert_stateful_objects_in_state
        if self._replicas == "all":
            plain = {k: v.state_dict() if _differs(v) else v for k, v in state.items()}
            own = {**convert(plain, filter=filter or {}), KEY: found}
            write(path, partial(self.checkpoint_io.save_checkpoint, own, rank_file(path)))
        shared = {**convert(state, filter=filter or {}), KEY: found}
        save = super().save_checkpoint
        write(path, partial(save, path, shared, storage_options=storage_options))

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """Load a checkpoint into modules and optimizers; return its other entries.

        Raises:
            KeyError: ``strict``, and it lacks something of ``state``.
            EnvironmentProblem: A rank cannot read its file; raised on all.
        """
        loaded = read(path, partial(super().load_checkpoint, **kwargs), resumes=True)
        loaded.pop(KEY, None)
        if _differs(state):
            _load(state, loaded, strict=strict)
            return {}
        missing = [key for key in state or () if key not in loaded]
        if missing and strict:
            raise KeyError(
                f"Fabric.load: {path} has no {', '.join(missing)}; it has {', '.join(loaded)}. "
                "Leave them out of state, or give strict=False"
            )
        for key in [key for key in state or () if key in loaded]:
            value = loaded.pop(key)
            if hasattr(state[key], "load_state_dict"):
                _load(state[key], value, strict=strict)
            else:
                state[key] = value
        return loaded


def _differs(part: Any) -> bool:
    return isinstance(part, (torch.nn.Module, torch.optim.Optimizer))


def _load(part: Any, state: Any, *, strict: bool) -> None:
    if isinstance(part, torch.nn.Module):
        part.load_state_dict(state, strict=strict)
    else:
        part.load_state_dict(state)
