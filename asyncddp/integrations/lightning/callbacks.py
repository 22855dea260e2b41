"""Mixins of callbacks, shared by the packages ``lightning`` and ``pytorch_lightning``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import asyncddp
from asyncddp.algorithms import ALGORITHMS
from asyncddp.context.user_activities import timeline_end_activity, timeline_start_activity
from asyncddp.errors import UsageError
from asyncddp.optim.algorithm_switch import schedule_entries
from asyncddp.optim.distributed_optimizer import DistributedOptimizer

_NOT_SCALARS = ("rank", "step", "time", "consensus_error", "departed")
_ROW = "lightning"


class ConsensusMonitorMixin:
    """Callback that logs each rank's consensus distance, staleness and times to the loggers.

    Args:
        every: Number of optimizer steps between reports.
        consensus: As in :func:`asyncddp.monitor`.
    """

    def __init__(self, every: int = 50, consensus: str | None = "projection") -> None:
        self._every, self._consensus = every, consensus
        self._monitor: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start monitoring the first optimizer."""

        def write(record: dict[str, Any]) -> None:
            rank = record["rank"]
            figures = {
                f"asyncddp/{name}/rank_{rank}": value
                for name, value in record.items()
                if name not in _NOT_SCALARS and value is not None
            }
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=record["step"])

        watched = _optimizers_of(trainer, "ConsensusMonitor")[0]
        self._monitor = asyncddp.monitor(
            watched, self._every, write, self._consensus, first_step=watched.steps
        )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the remaining records."""
        if self._monitor is not None:
            self._monitor.close()


class SwitchAlgorithmMixin:
    """Callback that switches the algorithm at the start of epochs.

    Args:
        at_epoch: Algorithms, or pairs of an algorithm and a dict of its arguments, by epoch from 0.
        replicas: As in ``DistributedOptimizer.switch_to``.

    Raises:
        UnknownNameError: No algorithm has the name.
        ArgumentError: No mapping from epochs.
    """

    def __init__(self, at_epoch: Mapping[int, Any], replicas: str = "average") -> None:
        where = "SwitchAlgorithm: argument at_epoch"
        self._entries = schedule_entries(where, "epoch", 0, "{5: 'decentralized'}", at_epoch)
        for algorithm, _ in self._entries.values():
            if isinstance(algorithm, str):
                ALGORITHMS.location_of(algorithm)
        self._replicas, self._made = replicas, -1

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start with the strategy's own algorithm."""
        self._made = -1

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Switch to the algorithm that was in use when the checkpoint was written."""
        due = [epoch for epoch in self._entries if epoch <= checkpoint["epoch"]]
        if due and trainer.state.fn == "fit":
            self._switch(trainer, max(due))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Switch the algorithm if one is given for this epoch."""
        if trainer.current_epoch in self._entries:
            self._switch(trainer, trainer.current_epoch)

    def _switch(self, trainer: Any, epoch: int) -> None:
        if self._made == epoch:
            return
        self._made = epoch
        algorithm, arguments = self._entries[epoch]
        for optimizer in _optimizers_of(trainer, "SwitchAlgorithm"):
            optimizer.switch_to(algorithm, replicas=self._replicas, **arguments)


class TimelineCallbackMixin:
    """Callback that records epochs and validation in the timeline (``asyncddp run --timeline``)."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the start of an epoch."""
        timeline_start_activity(_ROW, f"epoch {trainer.current_epoch}")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the end of an epoch."""
        timeline_end_activity(_ROW)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the start of validation."""
        timeline_start_activity(f"{_ROW} validation", "validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the end of validation."""
        timeline_end_activity(f"{_ROW} validation")


def _optimizers_of(trainer: Any, caller: str) -> list[DistributedOptimizer]:
    found = [one for one in trainer.optimizers if isinstance(one, DistributedOptimizer)]
    if not found:
        raise UsageError(
            f"{caller}: the Trainer has no optimizer that averages; expected "
            "strategy=AsyncDDPStrategy(…), or a DistributedOptimizer of configure_optimizers, got "
            f"{type(trainer.strategy).__name__}"
        )
    return found
