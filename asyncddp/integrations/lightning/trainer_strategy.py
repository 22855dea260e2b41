"""Strategy mixin for the Trainer of the packages ``lightning`` and ``pytorch_lightning``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from asyncddp.algorithms import Algorithm
from asyncddp.algorithms.wrapper_setup import checked_choice
from asyncddp.errors import ArgumentError, PeerError
from asyncddp.integrations.lightning.collectives import logged_figure, reduce_in_place
from asyncddp.integrations.lightning.trainer_checkpoints import TrainerCheckpointsMixin
from asyncddp.integrations.lightning.world_strategy import check_shares_nothing
from asyncddp.optim.parameter_sync import broadcast_parameters

VALIDATIONS = ("local", "average")


class TrainerStrategyMixin(TrainerCheckpointsMixin):
    """Strategy of Lightning's Trainer that trains by any of asyncddp's algorithms.

    Each optimizer is wrapped by :class:`asyncddp.DistributedOptimizer`. Ranks, devices and samplers
    are those of the world that ``asyncddp run``, ``mpirun``, ``srun`` or ``torchrun`` has started;
    making a strategy joins it. ``torch.distributed`` is not used.

    Args:
        algorithm: Name of a method, or a subclass of ``asyncddp.algorithms.Algorithm``.
        communication: As of :class:`asyncddp.DistributedOptimizer`.
        topology: Graph or schedule of ranks, a function that makes one for a number of ranks, such
            as ``topology.one_peer_exponential``, or its name; None for the world's.
        compression: As of :class:`asyncddp.DistributedOptimizer`.
        replicas: Whose model a checkpoint holds, as of :func:`asyncddp.save_checkpoint`:
            ``"average"`` of all ranks, ``"rank0"``, or ``"all"``: the average, and a file of each
            rank beside it, each whole, from which as many ranks resume.
        validate: Model in validation, test and prediction: each rank's ``"local"`` model, or the
            ``"average"``.
        process_group_backend: Backend with which to initialise ``torch.distributed``, for
            torchmetrics and SyncBatchNorm; Lightning then lets all ranks wait for rank 0 in each
            batch.
        checkpoint: Another name for ``replicas``, with ``"per_rank"`` for ``"all"``.
        accelerator, parallel_devices, checkpoint_io, precision_plugin: As of Lightning's own
            strategies.
        **options: Other arguments of :class:`asyncddp.DistributedOptimizer`, and options of the
            method.

    Raises:
        UnknownNameError: No method has the name.
        ArgumentError: An invalid argument.
    """

    _caller: ClassVar[str] = "Trainer"
    model: Any
    _trained: Any = None  # the module of which ranks have models of their own

    def __init__(
        self,
        algorithm: str | type[Algorithm] = "adapt_then_combine",
        communication: str | None = None,
        topology: Any = None,
        compression: Any = None,
        *,
        replicas: str = "average",
        validate: str = "local",
        process_group_backend: str | None = None,
        checkpoint: str | None = None,
        accelerator: Any = None,
        parallel_devices: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        checked_choice("AsyncDDPStrategy: argument validate", validate, VALIDATIONS)
        arguments = {**options, "communication": communication, "compression": compression}
        self._validate = validate
        self._join_world(
            algorithm,
            topology,
            checkpoint or replicas,
            process_group_backend,
            arguments,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, in place."""
        figure = logged_figure()
        try:
            return reduce_in_place(tensor, group, reduce_op, figure)
        except PeerError as error:
            if figure is not None:
                error.args = (
                    f"{error}. It is a figure of self.log with sync_dist=True: if ranks have "
                    "unequal numbers of batches, log it with on_step=False, or give all as many",
                )
            raise

    # training

    def model_to_device(self) -> None:
        """Move the model to its device, and broadcast rank 0's before its first training."""
        module = self.lightning_module
        module.to(self.root_device)
        if module.trainer.state.fn == "fit" and self._trained is not module:
            broadcast_parameters(module, mesh=self._replica_mesh)
            self._trained = module

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, with synchronised batch normalisation if requested."""
        self._failed = self._paused = False
        if trainer.state.fn == "fit":
            self.check_checkpoint_folders(trainer)
        if self._layer_sync is not None and trainer.state.fn == "fit":
            self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizers, and wrap them to average over ranks."""
        super().setup_optimizers(trainer)
        optimizers = [one for one in self.optimizers if type(one).__name__ != "_MockOptimizer"]
        check_shares_nothing("configure_optimizers gave", optimizers)
        name = self._settings.method_name
        if name == "qadam" and len(optimizers) != 1:
            raise ArgumentError(
                "AsyncDDPStrategy: argument algorithm: qadam trains by one QAdamOptimizer, but "
                f"configure_optimizers gave {len(optimizers)} optimizers; give one of all "
                "parameters, or take another algorithm such as bytegrad"
            )
        self.optimizers = [
            self._wrapped(one, self.lightning_module) if one in optimizers else one
            for one in self.optimizers
        ]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step through the module's ``__call__``, so that its hooks run."""
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(
                self.model, self.lightning_module, "training_step", *args, **kwargs
            )

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Make an optimizer step; a manual one, after its backward passes, gets no closure."""
        plugin = self.precision_plugin
        by_hand = getattr(closure, "__name__", "") == "do_nothing_closure"
        if by_hand and getattr(plugin, "scaler", None) is None:
            plugin._after_closure(model or self.lightning_module, optimizer)
            return optimizer.step(**kwargs)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients inside a ``with`` block, so that a step counts as one pass."""
        with ExitStack() as stack:
            for optimizer in self.distributed_optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    def on_train_end(self) -> None:
        """Finish all communication, and free the windows; collective."""
        for optimizer in self.distributed_optimizers:
            optimizer.close()
