"""Evaluation and checkpoints of models that differ between ranks, or of their average."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from asyncddp.checkpoint.training_state import without_own_memory
from asyncddp.integrations.lightning.checkpoints import (
    KEY,
    check_writable,
    copied,
    described,
    rank_file,
    read,
    remove_rank_files,
    shared_model_state,
    shared_optimizer_state,
    write,
)
from asyncddp.integrations.lightning.world_strategy import WorldStrategyMixin
from asyncddp.ops.barrier import barrier
from asyncddp.ops.object_collectives import broadcast_object
from asyncddp.optim.average_models import average_model
from asyncddp.optim.distributed_optimizer import DistributedOptimizer

_OF_FILES = (
    "best_k_models", "best_model_path", "best_model_score", "kth_best_model_path", "kth_value",
    "last_model_path",
)  # fmt: skip
"""Attributes by which Lightning's ModelCheckpoint knows the files that are there."""


class TrainerCheckpointsMixin(WorldStrategyMixin):
    """Mixin of the Trainer's strategy: evaluates and saves models that differ between ranks.

    After a failure nothing here is collective, since other ranks may not take part: a checkpoint
    written then, such as Lightning's on an exception, holds rank 0's model.
    """

    optimizers: Any
    _validate: str
    _averaged: ExitStack | None = None  # open while the model holds the average
    _failed = _paused = False

    @property
    def distributed_optimizers(self) -> list[DistributedOptimizer]:
        """Wrapped optimizers of the current fit."""
        return [one for one in self.optimizers if isinstance(one, DistributedOptimizer)]

    @property
    def _interrupted(self) -> bool:
        trainer = getattr(self.lightning_module, "_trainer", None)
        return self._failed or bool(trainer is not None and trainer.interrupted)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, unless there was a failure."""
        if not self._interrupted:
            barrier()

    def on_exception(self, exception: BaseException) -> None:
        """Record the failure, and restore each rank's own model."""
        self._failed = True
        self._restore_own_model()

    def teardown(self) -> None:
        """Restore each rank's own model, and release Lightning's resources."""
        self._restore_own_model()
        super().teardown()

    # evaluation

    def on_validation_start(self) -> None:
        """Pause asynchronous averaging, and load the average model if it is to be validated."""
        for optimizer in self.distributed_optimizers:
            optimizer.abort()
        self._paused = True
        if self._validate == "average" and self._averaged is None:
            self._averaged = ExitStack()
            average = average_model(self.lightning_module, mesh=self._replica_mesh)
            self._averaged.enter_context(average)

    def on_validation_end(self) -> None:
        """Restore each rank's own model, and resume asynchronous averaging."""
        self._restore_own_model()
        if self._paused:
            self._paused = False
            for optimizer in self.distributed_optimizers:
                optimizer.resume()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def _restore_own_model(self) -> None:
        averaged, self._averaged = self._averaged, None
        if averaged is not None:
            averaged.close()

    # checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: each rank may load its own weights, which setup would overwrite."""
        return True

    def check_checkpoint_folders(self, trainer: Any) -> None:
        """Raise an error on all ranks if a callback's folder cannot be written; collective."""
        found = [getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks]
        folders = [Path(one) for one in found if one is not None and "://" not in str(one)]
        check_writable(folders, every_rank=self._replicas == "all")

    def _own_state(self) -> dict[str, Any]:
        found: dict[str, Any] = super().lightning_module_state_dict()
        return found

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state for a checkpoint; collective for the average."""
        if self._averaged is not None and self._replicas != "rank0" and not self._interrupted:
            return copied(self._own_state())
        self._restore_own_model()
        policy = "rank0" if self._interrupted else self._replicas
        return shared_model_state(policy, self.lightning_module)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint on rank 0, after each rank's own if ``replicas`` is ``"all"``."""
        alone = self._interrupted
        policy = "rank0" if alone else self._replicas
        states = checkpoint.get("optimizer_states", [])
        methods = [one.algorithm for one in self.distributed_optimizers]
        if not alone:
            filepath = self._agree_on_paths(checkpoint, filepath)
        method = methods[0] if methods else self._settings.method_name
        checkpoint[KEY] = described(policy, method, alone=alone)
        save = super().save_checkpoint
        save_shared = partial(save, checkpoint, filepath, storage_options=storage_options)
        if alone:
            checkpoint["optimizer_states"] = list(map(without_own_memory, states))
            save_shared()
            return
        if policy == "all":
            self._restore_own_model()
            own = {**checkpoint, "state_dict": self._own_state()}
            write(filepath, partial(self.checkpoint_io.save_checkpoint, own, rank_file(filepath)))
        checkpoint["optimizer_states"] = [shared_optimizer_state(policy, one) for one in states]
        write(filepath, save_shared)

    def _agree_on_paths(self, checkpoint: dict[str, Any], filepath: Any) -> Any:
        """Set rank 0's file names on all ranks, here and in ModelCheckpoint; collective.

        A name or an order by figures that ranks have logged each for itself differs between them.
        """
        callbacks = self.lightning_module.trainer.checkpoint_callbacks
        mine = [{k: v for k, v in vars(one).items() if k in _OF_FILES} for one in callbacks]
        on_host = tree_map_only(torch.Tensor, torch.Tensor.cpu, [filepath, mine])
        filepath, agreed = broadcast_object(on_host)
        for callback, known in zip(callbacks, agreed, strict=True):
            vars(callback).update(known)
            saved = checkpoint.get("callbacks", {}).get(callback.state_key)
            if known and saved:
                saved.update({name: known[name] for name in known if name in saved})
        return filepath

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint and the rank files beside it."""
        if self._replicas == "all":
            remove_rank_files(filepath)
        super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint; to resume, it must be one of this strategy."""
        load = super().load_checkpoint
        fits = self.lightning_module.trainer.state.fn == "fit"
        return read(
            checkpoint_path,
            lambda file: load(file, *args, **kwargs),
            resumes=fits,
            required=fits,
        )
