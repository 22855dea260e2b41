"""Work of ``lightning`` on every rank: fits by each strategy in turns."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import click
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

import asyncddp as bf
from asyncddp import topology
from asyncddp.integrations.lightning import AsyncDDPStrategy
from benchmarks.lightning import DDP, STRATEGIES
from benchmarks.machine_info import facts_of_run
from benchmarks.training_models import Workload, convnet, narrow_mlp

_WARM_UP = 5  # batches before the clock starts
_LATE = 10  # times as long as a local step takes the late rank


class _Classifier(LightningModule):  # type: ignore[misc]
    """A workload under the Trainer."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = workload.build()

    def training_step(self, batch: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        """The loss."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)


class _Clock(Callback):  # type: ignore[misc]
    """Takes the time from the end of the warm-up to the last batch, and may be late in each."""

    def __init__(self, lateness: float) -> None:
        self.lateness, self.began, self.ended = lateness, 0.0, 0.0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock."""
        if batch_idx == _WARM_UP:
            self.began = time.monotonic()
        time.sleep(self.lateness)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop it, until the next batch ends."""
        self.ended = time.monotonic()


def _strategy(name: str) -> Any:
    if name == DDP:
        return DDPStrategy(process_group_backend="gloo")
    algorithm = STRATEGIES[name]
    one_peer = algorithm == "adapt_then_combine"
    return AsyncDDPStrategy(algorithm, topology=topology.one_peer_exponential if one_peer else None)


def _batch_time(name: str | None, workload: Workload, batches: int, lateness: float) -> float:
    """Fit by a strategy, or on this rank alone; return the mean seconds of a batch."""
    inputs, targets = workload.batch(workload.samples)
    every = [(inputs, targets)] * (_WARM_UP + batches)
    loader: Any = torch.utils.data.DataLoader(every, batch_size=None)  # type: ignore[arg-type]
    clock = _Clock(lateness)
    trainer = Trainer(
        strategy="auto" if name is None else _strategy(name),
        devices=bf.size() if name == DDP else 1,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[clock],
    )
    trainer.fit(_Classifier(workload), loader)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    bf.barrier()
    return (clock.ended - clock.began) / batches


def _rounds(rounds: int, batches: int, workload: Workload) -> Mapping[str, list[list[float]]]:
    """Return this rank's seconds of a batch by strategy: each round's, alone and beside."""
    found: dict[str, list[list[float]]] = {name: [] for name in STRATEGIES}
    local = _batch_time(None, workload, batches, 0.0)
    lateness = (_LATE - 1) * local if bf.rank() == 0 else 0.0
    for number in range(rounds):
        for name, times in found.items():
            pair = [_batch_time(name, workload, batches, late) for late in (0.0, lateness)]
            times.append(pair)
            if bf.rank() == 0:
                click.echo(f"round {number + 1} of {rounds}: {name}")
    return found


def measure(rounds: int, batches: int, small: bool) -> dict[str, Any]:
    """Measure on this run's ranks; gives what the last rank has found."""
    warnings.simplefilter("ignore")
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.ERROR)
    bf.init()
    workload = narrow_mlp(4, layers=10) if small else convnet(16)
    found = _rounds(rounds, batches, workload)
    return {"times": bf.allgather_object(found)[-1], "header": facts_of_run()}
