"""Program of ranks that step until they are told to end, and are killed meanwhile.

usage: python -m benchmarks.elastic.rank_loops LOOP FOLDER; ``FOLDER/end`` holds the last step's
number. Each process writes to a log of its own there when its steps ended, which outlives it.
"""

from __future__ import annotations

import importlib
import os
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not said to be exported

from benchmarks.tables import MB, RankGroup
from benchmarks.training_models import narrow_mlp
from benchmarks.training_step import TrainingSetup, ddp, make_training, ours

RECORD = struct.Struct("3d")
"""Record of a step: when it ended, CPU seconds of the process, and the era in which it ended."""
WORKLOAD = narrow_mlp(layers=16, width=128)  # 1 MB
NEIGHBORS, GRADIENTS, TRAINING = "neighbor_allreduce", "gradient_allreduce", "adapt_then_combine"
TORCH_ELASTIC, TORCHFT = "torch elastic", "torchft"


@dataclass(frozen=True)
class Loop:
    """Loop of a rank.

    Attributes:
        rank: This rank's number for life.
        step: Makes a step; returns False if it was dropped.
        era: Returns a number that grows when a rank that took part has gone.
        keeps: What must live as long.
    """

    rank: int
    step: Callable[[], object]
    era: Callable[[], float]
    keeps: Any = None


def _training(rank: int) -> TrainingSetup:
    return make_training(RankGroup(SimpleNamespace(rank=rank), None), WORKLOAD)


def _ours(work: str) -> Loop:
    """Averages of 1 MB, or training steps by a method."""
    import asyncddp as bf

    bf.init(topology="one_peer_exponential")
    if work == NEIGHBORS:
        average = partial(bf.neighbor_allreduce, torch.ones(MB // 4), name="x")
        return Loop(bf.rank(), average, lambda: bf.view().number)
    training = _training(bf.rank())
    ours(training, work)
    return Loop(bf.rank(), partial(training.step, 0), lambda: bf.view().number)


def _torch_elastic() -> Loop:
    """DistributedDataParallel over gloo; all processes are new after a death."""
    torch.distributed.init_process_group("gloo")
    training = _training(torch.distributed.get_rank())
    ddp(training, RankGroup(None, None))
    attempt = float(os.environ["TORCHELASTIC_RESTART_COUNT"])
    return Loop(torch.distributed.get_rank(), partial(training.step, 0), lambda: attempt)


def _torchft() -> Loop:
    """The loop of torchft's README: a replica of one process, whose steps may be dropped."""
    torchft = importlib.import_module("torchft")  # which is in an environment of its own
    rank = int(os.environ["REPLICA"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    training = _training(rank)
    model, optimizer = training.model, training.optimizer

    def load(state: list[dict[str, Any]]) -> None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: [model.state_dict(), optimizer.state_dict()],
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=str(rank),
        hostname="127.0.0.1",
    )
    training.model = torchft.DistributedDataParallel(manager, model)
    training.optimizer = torchft.Optimizer(manager, optimizer)

    def step() -> bool:
        before = manager.current_step()
        training.step(0)
        return bool(manager.current_step() > before)

    return Loop(rank, step, lambda: -manager.num_participants(), keeps=store)


LOOPS: dict[str, Callable[[], Loop]] = {
    **{work: partial(_ours, work) for work in (NEIGHBORS, GRADIENTS, TRAINING)},
    TORCH_ELASTIC: _torch_elastic,
    TORCHFT: _torchft,
}


def main() -> None:
    """Step until the last step is made."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    loop, end, last = LOOPS[name](), folder / "end", None
    with (folder / f"{loop.rank}-{os.getpid()}").open("wb", buffering=0) as log:
        for number in count(1):
            if loop.step() is not False:
                log.write(RECORD.pack(time.monotonic(), time.process_time(), loop.era()))
            if last is None and end.exists():
                last = int(end.read_text())
            if last == number:
                return


if __name__ == "__main__":
    main()
