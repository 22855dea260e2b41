"""What AsyncDDPStrategy does, for whichever package of Lightning its class is made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from asyncddp.algorithms import ALGORITHMS, Algorithm
from asyncddp.context import current, init
from asyncddp.errors import ArgumentError, UsageError
from asyncddp.integrations.lightning.collectives import gather_stacked, reduce_in_place
from asyncddp.ops.barrier import barrier
from asyncddp.ops.object_collectives import broadcast_object
from asyncddp.optim.average_models import average_model
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from asyncddp.optim.method_settings import MethodSettings
from asyncddp.optim.parameter_sync import broadcast_parameters

KEY = "asyncddp"
CHECKPOINTS = ("average", "rank0", "per_rank")
VALIDATIONS = ("local", "average")


class StrategyMembers:
    """Trains a LightningModule on the library's world, by any of its methods.

    Each optimizer is wrapped by :class:`asyncddp.DistributedOptimizer`. Ranks, devices and samplers
    are those of the world that ``asyncddp run``, ``mpirun``, ``srun`` or ``torchrun`` has started;
    making a strategy joins it. ``torch.distributed`` stays out of use.

    Args:
        algorithm: Name of a method, or a subclass of ``asyncddp.algorithms.Algorithm``.
        communication: As of :class:`asyncddp.DistributedOptimizer`.
        topology: Graph or schedule of ranks, or a function that makes one for a number of ranks,
            such as ``topology.one_peer_exponential``; None for the world's.
        compression: As of :class:`asyncddp.DistributedOptimizer`.
        checkpoint: Whose model a checkpoint holds: ``"average"`` of all ranks, ``"rank0"``, or the
            average and ``"per_rank"`` files beside it, by which as many ranks resume.
        validate: What validation, test and prediction see: each rank's ``"local"`` model, or the
            ``"average"``.
        process_group_backend: Backend with which to initialise ``torch.distributed``, for
            torchmetrics and SyncBatchNorm; Lightning then lets all ranks wait for rank 0 in each
            batch.
        accelerator, parallel_devices, checkpoint_io, precision_plugin: As of Lightning's own
            strategies.
        **options: Other arguments of :class:`asyncddp.DistributedOptimizer`, and options of the
            method.

    Raises:
        UnknownNameError: No method has the name.
        ArgumentError: An argument that cannot be.
    """

    strategy_name: ClassVar[str] = "asyncddp"
    environment: ClassVar[Callable[[], Any]]
    optimizers: Any
    lightning_module: Any
    model: Any
    _layer_sync: Any = None
    _configured_nodes = 1

    def __init__(
        self,
        algorithm: str | type[Algorithm] = "adapt_then_combine",
        communication: str | None = None,
        topology: Any = None,
        compression: Any = None,
        *,
        checkpoint: str = "average",
        validate: str = "local",
        process_group_backend: str | None = None,
        accelerator: Any = None,
        parallel_devices: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        _check_choice("checkpoint", checkpoint, CHECKPOINTS)
        _check_choice("validate", validate, VALIDATIONS)
        arguments = {**options, "communication": communication, "compression": compression}
        self._settings = MethodSettings.of(algorithm, arguments)
        self._settings.compressor_for(self._settings.create_method())
        self._topology, self._checkpoint, self._validate = topology, checkpoint, validate
        self._process_group_backend = process_group_backend
        self._averaged: ExitStack | None = None
        self._failed = self._paused = False
        init()
        _set_zero_rank(current().rank)
        members: Any = super()
        members.__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=type(self).environment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``asyncddp``, and ``asyncddp_NAME`` for each method."""
        name = cls.strategy_name
        strategy_registry.register(name, cls, "neighbour averaging of asyncddp", override=True)
        for method in ALGORITHMS:
            strategy_registry.register(
                f"{name}_{method}", cls, f"asyncddp's {method}", override=True, algorithm=method
            )

    # the world

    @property
    def is_distributed(self) -> bool:
        """Whether there are other ranks, so that data are shared out."""
        return current().size > 1

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return current().machine_size

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._configured_nodes = number

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks for samplers."""
        return {"num_replicas": current().size, "rank": current().rank}

    @property
    def root_device(self) -> torch.device:
        """Device of this rank: one for each rank of a machine, where there are so many."""
        devices: list[torch.device] = list(getattr(self, "parallel_devices", None) or [])
        if not devices:
            return torch.device("cpu")
        local = current().local_rank
        if len(devices) == 1 and devices[0].type == "cuda" and current().local_size > 1:
            return torch.device("cuda", local % torch.cuda.device_count())
        return devices[local % len(devices)]

    def _configure_launcher(self) -> None:
        """Check the Trainer's flags against the world, at the end of its constructor."""
        context, devices = current(), list(getattr(self, "parallel_devices", None) or [])
        every_gpu = bool(devices) and devices[0].type == "cuda"
        every_gpu = every_gpu and len(devices) == torch.cuda.device_count()
        if len(devices) not in (0, 1, context.local_size) and not every_gpu:
            raise ArgumentError(
                f"Trainer: argument devices: got {len(devices)} on a machine with "
                f"{context.local_size} of the world's {context.size} ranks; leave devices out, or "
                f"start {len(devices)} ranks: asyncddp run -np {len(devices)} SCRIPT"
            )
        if self._configured_nodes not in (1, context.machine_size):
            raise ArgumentError(
                f"Trainer: argument num_nodes: got {self._configured_nodes}, but the world's ranks "
                f"are on {context.machine_size}; leave num_nodes out"
            )
        if self._layer_sync is not None and self._process_group_backend is None:
            raise ArgumentError(
                "Trainer: argument sync_batchnorm: torch's layers need torch.distributed, which is "
                "not in use; give AsyncDDPStrategy(process_group_backend='gloo'), or 'nccl' on GPUs"
            )

    def setup_environment(self) -> None:
        """Set the device, and begin ``torch.distributed`` if it was asked for."""
        members: Any = super()
        members.setup_environment()
        backend = self._process_group_backend
        if backend is None or torch.distributed.is_initialized():
            return
        if backend == "asyncddp":
            import asyncddp.integrations.torch_distributed  # noqa: F401 - registers the backend
        context = current()
        if context.rank == 0 and context.size > 1:
            warnings.warn(
                "AsyncDDPStrategy: with process_group_backend Lightning broadcasts from rank 0 "
                "before each batch, so that all ranks go at the pace of the slowest; leave it out "
                "unless torchmetrics or SyncBatchNorm need it",
                stacklevel=2,
            )
        torch.distributed.init_process_group(backend, rank=context.rank, world_size=context.size)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; not after a failure, when not all may come."""
        if not self._interrupted:
            barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank."""
        return broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, in place."""
        return reduce_in_place(tensor, group, reduce_op)

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Gather tensors of all ranks along a new first dimension."""
        return gather_stacked(tensor, group, sync_grads=sync_grads)

    # training

    def model_to_device(self) -> None:
        """Move the model to its device, and give all ranks rank 0's."""
        self.lightning_module.to(self.root_device)
        self._failed = self._paused = False
        broadcast_parameters(self.lightning_module)

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, with layers that synchronise if they were asked for."""
        if self._layer_sync is not None and trainer.state.fn == "fit":
            self.model = self._layer_sync.apply(self.model)
        members: Any = super()
        members.setup(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizers, and wrap them."""
        members: Any = super()
        members.setup_optimizers(trainer)
        optimizers = [one for one in self.optimizers if type(one).__name__ != "_MockOptimizer"]
        name = self._settings.method_name
        if name == "qadam" and len(optimizers) != 1:
            raise ArgumentError(
                "AsyncDDPStrategy: argument algorithm: qadam trains by one QAdamOptimizer, but "
                f"configure_optimizers gave {len(optimizers)} optimizers; give one of all "
                "parameters, or take another algorithm such as bytegrad"
            )
        self.optimizers = [
            self._wrapped(one) if one in optimizers else one for one in self.optimizers
        ]

    def _wrapped(self, optimizer: torch.optim.Optimizer) -> DistributedOptimizer:
        arguments = self._settings.arguments()
        makes = callable(self._topology) and not hasattr(self._topology, "n")
        chosen = self._topology
        arguments["topology"] = chosen(current().size) if makes and chosen is not None else chosen
        return DistributedOptimizer(optimizer, self.lightning_module, **arguments)

    @property
    def distributed_optimizers(self) -> list[DistributedOptimizer]:
        """The wrapped optimizers of the fit under way."""
        return [one for one in self.optimizers if isinstance(one, DistributedOptimizer)]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step by the module's ``__call__``, so that hooks on the module run."""
        parts: Any = self
        with parts.precision_plugin.train_step_context():
            return parts._forward_redirection(
                self.model, self.lightning_module, "training_step", *args, **kwargs
            )

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Make a step; one by hand, whose backward passes are over, gets no closure."""
        parts: Any = self
        plugin = parts.precision_plugin
        by_hand = getattr(closure, "__name__", "") == "do_nothing_closure"
        if by_hand and getattr(plugin, "scaler", None) is None:
            plugin._after_closure(model or self.lightning_module, optimizer)
            return optimizer.step(**kwargs)
        members: Any = super()
        return members.optimizer_step(optimizer, closure, model, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let gradients accumulate, so that a step counts as one pass."""
        counters = [one._phase.accumulation for one in self.distributed_optimizers]
        for counter in counters:
            counter.held = True
        try:
            yield
        finally:
            for counter in counters:
                counter.held = False
                counter.forget()

    # evaluation

    def _begin_evaluation(self) -> None:
        for optimizer in self.distributed_optimizers:
            optimizer.abort()
        self._paused = True
        if self._validate == "average" and self._averaged is None:
            self._averaged = ExitStack()
            self._averaged.enter_context(average_model(self.lightning_module))

    def _end_evaluation(self) -> None:
        self._restore_own_model()
        if self._paused:
            self._paused = False
            for optimizer in self.distributed_optimizers:
                optimizer.resume()

    def _restore_own_model(self) -> None:
        averaged, self._averaged = self._averaged, None
        if averaged is not None:
            averaged.close()

    def on_validation_start(self) -> None:
        """Pause averaging by the clock, and take the average model if that is validated."""
        self._begin_evaluation()

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self) -> None:
        """Give each rank its own model again."""
        self._end_evaluation()

    on_test_end = on_predict_end = on_validation_end

    def on_train_end(self) -> None:
        """Finish what is under way, and free the windows; collective."""
        for optimizer in self.distributed_optimizers:
            optimizer._phase.conclude()
            optimizer._phase.wait_for_reads()

    def on_exception(self, exception: BaseException) -> None:
        """Note the failure: no collective follows, since other ranks may not come."""
        self._failed = True
        self._restore_own_model()

    @property
    def _interrupted(self) -> bool:
        trainer = getattr(self.lightning_module, "_trainer", None)
        return self._failed or bool(trainer is not None and trainer.interrupted)

    def teardown(self) -> None:
        """Give each rank its own model again, and release what Lightning holds."""
        self._restore_own_model()
        members: Any = super()
        members.teardown()

    # checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: each rank may load weights of its own, which setup would overwrite."""
        return True

    def _own_state(self) -> dict[str, Any]:
        members: Any = super()
        found: dict[str, Any] = members.lightning_module_state_dict()
        return found

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model that a checkpoint holds; collective for the average."""
        if self._checkpoint == "rank0" or self._interrupted:
            self._restore_own_model()
            return self._own_state()
        if self._averaged is not None:
            return _copied(self._own_state())
        with average_model(self.lightning_module):
            return _copied(self._own_state())

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write the checkpoint on rank 0, and before it each rank's own if that was asked for."""
        parts: Any = self
        checkpoint[KEY] = {
            "world_size": current().size,
            "algorithm": self._settings.method_name,
            "checkpoint": self._checkpoint,
        }
        states = checkpoint.get("optimizer_states", [])
        if self._checkpoint == "per_rank" and not self._interrupted:
            self._restore_own_model()
            own = {"state_dict": self._own_state(), "optimizer_states": states}
            parts.checkpoint_io.save_checkpoint(own, _rank_file(filepath))
            barrier()
        checkpoint["optimizer_states"] = [self._shared_state(one) for one in states]
        members: Any = super()
        members.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _shared_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state without what a method remembers of ranks' own models."""
        optimizers = self.distributed_optimizers
        if KEY not in state or all(o._averager.algorithm.replicates_model for o in optimizers):
            return state
        return {**state, KEY: {**state[KEY], "parameters": {}, "compressors": []}}

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint with the ranks' files beside it."""
        if self._checkpoint == "per_rank":
            Path(_rank_file(filepath)).unlink(missing_ok=True)
        members: Any = super()
        members.remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint; to resume it must be one of this strategy."""
        members: Any = super()
        loaded: dict[str, Any] = members.load_checkpoint(checkpoint_path, *args, **kwargs)
        found = loaded.get(KEY)
        if self.lightning_module.trainer.state.fn != "fit":
            return loaded
        if found is None:
            raise UsageError(
                f"AsyncDDPStrategy: {checkpoint_path} is not a checkpoint of this strategy, so "
                "that it does not tell how averaging goes on. Begin a new run from its weights: "
                "Model.load_from_checkpoint(path), then fit without ckpt_path"
            )
        if found["checkpoint"] == "per_rank" and found["world_size"] == current().size:
            own: dict[str, Any] = members.load_checkpoint(
                _rank_file(checkpoint_path), *args, **kwargs
            )
            loaded.update(own)
        return loaded


def _check_choice(argument: str, given: Any, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ArgumentError(
            f"AsyncDDPStrategy: argument {argument}: expected one of "
            f"{', '.join(map(repr, known))}, got {given!r}"
        )


def _rank_file(filepath: Any) -> str:
    return f"{filepath}.rank{current().rank}"


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def _set_zero_rank(rank: int) -> None:
    """Tell Lightning which rank prints; both packages share this function."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    rank_zero_only.rank = rank
