"""Mixin for a Trainer of transformers that averages models or gradients with other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from asyncddp.algorithms import Algorithm
from asyncddp.algorithms.wrapper_setup import checked_choice
from asyncddp.checkpoint import load_checkpoint, save_checkpoint
from asyncddp.checkpoint.folder import POLICIES
from asyncddp.checkpoint.trainable_part import TrainablePart
from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.integrations.accelerate import FOLDER, leave_unwrapped
from asyncddp.ops.joint_action import together
from asyncddp.optim.average_models import average_model
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from asyncddp.optim.method_settings import MethodSettings

_TrainerOfTransformers: Any = object


class DecentralizedTrainerMixin(_TrainerOfTransformers):  # type: ignore[misc]  # any of them
    r"""Trainer of transformers that averages models or gradients by any of asyncddp's algorithms.

    The Trainer's optimizer, whatever its ``args.optim``, is wrapped by
    :class:`asyncddp.DistributedOptimizer`; the model is not wrapped in ``DistributedDataParallel``.
    Making one joins the world. For the Trainers of other libraries there is a mixin::

        class DecentralizedSFTTrainer(DecentralizedTrainerMixin, SFTTrainer):
            pass

    ``evaluate()``, ``predict()`` and ``save_model()`` use the average of the ranks' models, and are
    collective; so are checkpoints, from which ``from_pretrained`` loads the average. Each rank's
    own model, optimizer and random state are stored beside it in the folder ``asyncddp``, so that
    ``train(resume_from_checkpoint=True)`` resumes exactly. With another number of ranks all ranks
    continue from the average. ``trainer.model`` is each rank's own model, also after ``train()``,
    unless ``load_best_model_at_end`` has loaded the best average on all ranks.

    With asynchronous methods ranks do not agree on the number of tokens in each step: the argument
    ``average_tokens_across_devices`` becomes False.

    Args:
        *args: As in the Trainer.
        algorithm: Name of a method, or a subclass of ``asyncddp.algorithms.Algorithm``.
        topology: Graph or schedule of ranks, a function that makes it for their number, or its
            name; None for the world's.
        algorithm_kwargs: Other arguments of :class:`asyncddp.DistributedOptimizer`, and options of
            the method. ``num_steps_per_communication`` counts steps, of however many batches.
        replicas: Whose models a checkpoint holds, as of :func:`asyncddp.save_checkpoint`:
            ``"all"``, ``"average"``, which saves the disk n models and optimizers, or ``"rank0"``.
        **kwargs: As in the Trainer.

    Raises:
        UnknownNameError: No method has the name.
        ArgumentError: An invalid argument; DeepSpeed, FSDP or tensor parallelism is on.
        EnvironmentProblem: accelerate knows of another world.
    """

    optimizer: Any
    _distributed: DistributedOptimizer | None = None
    _paused = False

    def __init__(
        self,
        *args: Any,
        algorithm: str | type[Algorithm] = "adapt_then_combine",
        topology: Any = None,
        algorithm_kwargs: Mapping[str, Any] | None = None,
        replicas: str = "all",
        **kwargs: Any,
    ) -> None:
        checked_choice(f"{type(self).__name__}: argument replicas", replicas, POLICIES)
        own = {**(algorithm_kwargs or {}), "topology": topology}
        method = MethodSettings.of(algorithm, own).create_method()
        self._averaging, self._replicas = {**own, "algorithm": algorithm}, replicas
        super().__init__(*args, **kwargs)
        if any(pattern.one_sided for pattern in method.how):
            self.args.average_tokens_across_devices = False

    # training

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and keep it from wrapping the model in DistributedDataParallel."""
        super().create_accelerator_and_postprocess()
        leave_unwrapped(self.accelerator, type(self).__name__)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the Trainer's optimizer, or take the given one; wrap it to average over ranks."""
        plain = super().create_optimizer(*args, **kwargs)
        if isinstance(plain, DistributedOptimizer):
            raise ArgumentError(
                f"{type(self).__name__}: argument optimizers: expected a plain optimizer, which it "
                "wraps itself, got a DistributedOptimizer; give the one that this wraps, and the "
                "wrapper's arguments as algorithm, topology and algorithm_kwargs"
            )
        if self._distributed is None or getattr(plain, "optimizer", plain) is not self._distributed:
            self._distributed = DistributedOptimizer(plain, self.model, **self._averaging)
            self.optimizer = self._distributed
        return self.optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a backward pass; passes that only accumulate gradients do not average."""
        held = None if self.accelerator.sync_gradients else self._distributed
        with nullcontext() if held is None else held.no_sync():
            return super().training_step(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Stop averaging before the best model is loaded, so that another train() starts fresh."""
        if self._distributed is not None:
            self._distributed.close()
            self.optimizer, self._distributed = self._distributed.wrapped, None
        return super()._finalize_training(*args, **kwargs)

    # evaluation

    @contextmanager
    def _averaging_paused(self) -> Iterator[None]:
        """Stop asynchronous averaging inside a ``with`` block; collective."""
        distributed = None if self._paused else self._distributed
        if distributed is None:
            yield
            return
        self._paused = True
        try:
            distributed.abort()
            yield
            distributed.resume()
        finally:
            self._paused = False

    @contextmanager
    def _average_lent(self) -> Iterator[None]:
        """Give all ranks the average model inside a ``with`` block; collective."""
        with self._averaging_paused(), average_model(TrainablePart(self.model)):
            yield

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the average model, or predict with it."""
        with self._average_lent():
            return super().evaluation_loop(*args, **kwargs)

    # checkpoints

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the average model; collective."""
        with self._average_lent():
            save = partial(super().save_model, *args, **kwargs)
            together("save_model", "write the model", save)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._averaging_paused():
            super()._save_checkpoint(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save each rank's own state beside the average model; the Trainer would save rank 0's."""
        save_checkpoint(
            Path(output_dir, FOLDER),
            TrainablePart(self.model),
            self._distributed,
            self.lr_scheduler,
            step=self.state.global_step,
            extra=self.accelerator.scaler and self.accelerator.scaler.state_dict(),
            replicas=self._replicas,
            keep=1,
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load each rank's own state, or the state in another Trainer's checkpoint."""
        self._scaler_state = None
        if checkpoint is None:
            return
        folder, part = Path(checkpoint, FOLDER), TrainablePart(self.model)
        found = load_checkpoint(folder, part, self._distributed, self.lr_scheduler)
        if found is not None:
            self._scaler_state = found.extra
            return
        together("train", f"resume from {checkpoint}", partial(_require_missing, folder))
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load each rank's own loss scale."""
        super()._load_scaler(checkpoint)
        if self._scaler_state:
            self.accelerator.scaler.load_state_dict(self._scaler_state)


def _require_missing(folder: Path) -> None:
    if folder.exists():
        raise EnvironmentProblem(
            f"cannot resume from {folder.parent}: its {FOLDER} holds no whole checkpoint, perhaps "
            "since the run was ended while it was written. Name an older checkpoint in "
            "resume_from_checkpoint, or remove this one"
        )
