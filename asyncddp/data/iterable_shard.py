"""``IterableShard``: every n-th sample of an ``IterableDataset``, for ranks and their workers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as worker_module

from asyncddp.data.epoch_position import checked_replica, steps_of
from asyncddp.tensors.allocation import zeros


class IterableShard(IterableDataset[Any]):
    """A rank's share of a stream: every n samples are a row, one for each rank.

    With workers, ``batch`` rows in turn go to each of them, so that the batches that a loop has
    received are the first rows of the stream. All of them read all of it. A last row that is not
    full is filled up with the last sample, or dropped with ``drop_last``.
    """

    def __init__(self, loader: DataLoader[Any], num_replicas: int | None, rank: int | None) -> None:
        self.num_replicas, self.rank = checked_replica("prepare_data_loader", num_replicas, rank)
        self.dataset: Any = loader.dataset
        self._batch, self._drop_last = loader.batch_size or 1, loader.drop_last
        self._position = zeros((2,), torch.int64)
        self._position.share_memory_()  # type: ignore[no-untyped-call]  # persistent workers see it
        self.loaded: Any = None  # state of the data set at the position
        self._worker: Any = None
        self._settings: dict[str, int] = {}

    def _place(self, epoch: int, start: int) -> None:
        self._position[0], self._position[1] = epoch, start

    def __len__(self) -> int:
        return steps_of(len(self.dataset), self.num_replicas, self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        self._worker = self._worker or get_worker_info()
        worker_module._worker_info = None  # no data set is to divide itself among workers
        workers, worker = (self._worker.num_workers, self._worker.id) if self._worker else (1, 0)
        ranks, position, own, sample, mine = self.num_replicas, -1, None, None, False
        for position, sample in enumerate(self._left()):
            mine = position // (ranks * self._batch) % workers == worker
            if position % ranks == self.rank:
                own = sample
            if mine and position % ranks == ranks - 1:
                yield own
        rest = (position + 1) % ranks
        if rest and mine and not self._drop_last:
            yield own if self.rank < rest else sample

    def _left(self) -> Iterator[Any]:
        """Iterate over what is left of the epoch, on all ranks together."""
        epoch, start = self._position.tolist()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if self.loaded is not None:
            self.dataset.load_state_dict(self.loaded)
        return islice(self.dataset, start if self.loaded is None else 0, None)
