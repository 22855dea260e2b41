"""``prepare_data_loader``: a loader of one rank's share of the data, resumable in mid-epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy.typing as npt
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data._utils import worker as worker_module

from asyncddp.data.epoch_position import EpochPosition, checked_replica, steps_of
from asyncddp.data.stateful_sampler import StatefulDistributedSampler
from asyncddp.errors import ArgumentError
from asyncddp.tensors.allocation import zeros

_NAME = "prepare_data_loader"
_KEPT = (
    "batch_size drop_last num_workers collate_fn pin_memory timeout worker_init_fn generator "
    "multiprocessing_context prefetch_factor persistent_workers pin_memory_device"
)


class DataLoaderShard(EpochPosition, DataLoader[Any]):
    """``DataLoader`` of one rank's share of the data, made by :func:`prepare_data_loader`.

    The epoch advances when an iterator is exhausted, not when a loop is left early. The state
    counts the batches that the loop has received, not those that workers have prefetched.

    Attributes:
        epoch: The epoch, from 0 on.
    """

    def __init__(self, dataset: Any, share: Any, **options: Any) -> None:
        self._share, self._settings = share, share._settings
        self._step = (options["batch_size"] or 1) * share.num_replicas
        super().__init__(dataset, sampler=None if share is dataset else share, **options)
        reached = None if self.num_workers else getattr(share, "dataset", None)
        self._stateful = hasattr(reached, "load_state_dict")
        self._loaded: Any = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # wraps torch's iterator
        """Iterate over this rank's batches, from the epoch's start or the loaded position."""
        self._consumed = self._start
        self._share._place(self.epoch, self._start)
        self._share.loaded = self._loaded if self._stateful and self._start else None
        for batch in super().__iter__():
            self._consumed += self._step
            yield batch
        self._place(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of samples that all ranks have consumed, and the settings.

        Plain numbers, for ``bf.save_checkpoint(…, extra={"loader": loader.state_dict()})``, and
        under ``"dataset"`` the state of an ``IterableDataset`` that has one.
        """
        state = super().state_dict()
        if self._stateful:
            read = self._consumed > self._start
            state["dataset"] = self._share.dataset.state_dict() if read else self._loaded
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume in mid-epoch from a saved state; the number of ranks may differ.

        Args:
            state_dict: What :meth:`state_dict` gave.

        Raises:
            ArgumentError: The settings differ, so that samples would come in another order.
        """
        super().load_state_dict(state_dict)
        self._loaded = state_dict.get("dataset")


def prepare_data_loader(
    loader: DataLoader[Any],
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    num_replicas: int | None = None,
    rank: int | None = None,
    partition: Sequence[npt.ArrayLike] | None = None,
) -> DataLoaderShard:
    r"""Make a loader of this rank's share from a loader of all data; call it alike on all ranks.

    Batches have the loader's ``batch_size`` on each rank, and its data set, workers, collate
    function and other options. The samples are those of :class:`StatefulDistributedSampler`: a
    permutation by seed and epoch, divided among ranks. All ranks have equally many batches: where
    samples do not divide evenly some are repeated, or with ``drop_last=True`` of the loader left
    out.

    Of an ``IterableDataset``, which must give the same samples in the same order on all ranks, rank
    r of n takes the samples :math:`r, r + n, r + 2n, \dots` With workers each takes some of these,
    also of data sets that would divide themselves by ``get_worker_info()``. Every rank and worker
    reads the whole stream, and to resume is to read what was consumed once more; not so without
    workers where the data set has ``state_dict()`` and ``load_state_dict()``, which then are part
    of the loader's. If it has ``set_epoch()``, that is called.

    Args:
        loader: The loader, made with ``shuffle=True``, or without it.
        shuffle: Whether to draw a permutation for each epoch; None does as the loader does.
        seed: The seed of permutations, the same on all ranks.
        num_replicas: Number of ranks; by default all of them, or 1 before ``init()``.
        rank: Whose share; by default this rank's, or 0 before ``init()``.
        partition: The indices of each rank, where ranks have data of their own; see
            :class:`StatefulDistributedSampler`.

    Returns:
        A ``DataLoader`` with ``set_epoch``, ``state_dict`` and ``load_state_dict``.

    Raises:
        ArgumentError: The loader has a sampler of its own, or a value that cannot be.

    Example:
        >>> import asyncddp as bf
        >>> import torch
        >>> def epoch():
        ...     whole = torch.utils.data.DataLoader(range(8), batch_size=2)
        ...     return [batch.tolist() for batch in bf.prepare_data_loader(whole)]
        >>> with bf.local_world(2) as world:
        ...     world.run(epoch)
        [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    """
    if not isinstance(loader, DataLoader) or isinstance(loader, DataLoaderShard):
        raise ArgumentError(
            f"{_NAME}: argument loader: expected a torch DataLoader that no rank has a share of "
            f"yet, got {type(loader).__name__}; for a plain index take StatefulDistributedSampler"
        )
    options = {name: getattr(loader, name) for name in _KEPT.split()}
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        if shuffle or partition is not None:
            raise ArgumentError(
                f"{_NAME}: argument {'shuffle' if shuffle else 'partition'}: expected None with an "
                "IterableDataset, which alone determines its order; shuffle inside of it"
            )
        share = IterableShard(loader, num_replicas, rank)
        return DataLoaderShard(share, share, **options)
    shuffle = _shuffles(loader, dataset, shuffle)
    sampler = StatefulDistributedSampler(
        dataset, num_replicas, rank, shuffle, seed, loader.drop_last, partition=partition
    )
    return DataLoaderShard(dataset, sampler, **options)


def _shuffles(loader: DataLoader[Any], dataset: Any, shuffle: bool | None) -> bool:
    """Return whether to shuffle; raise an error unless the loader visits each sample once."""
    sampler: Any = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:
        sampler = loader.batch_sampler
    random = type(sampler) is RandomSampler and not sampler.replacement
    if not (random or type(sampler) is SequentialSampler) or len(sampler) != len(dataset):
        raise ArgumentError(
            f"{_NAME}: argument loader: expected one that goes once through its data set, made "
            f"with shuffle=True or False, got {type(sampler).__name__}; let a sampler of your own "
            "draw from bf.StatefulDistributedSampler(dataset), or give each rank one by its rank, "
            "and use the loader as it is; for a part of a data set take torch.utils.data.Subset"
        )
    return random if shuffle is None else shuffle


class IterableShard(IterableDataset[Any]):
    """One rank's shard of a stream: of every n consecutive samples, each of the n ranks gets one.

    Such n samples are a row. Workers take turns of ``batch`` rows, so that the batches that a loop
    has received are the first rows of the stream. Every worker reads the whole stream. An
    incomplete last row is filled up with the last sample, or dropped with ``drop_last``.
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
        """Iterate over the samples of all ranks that remain in the epoch."""
        epoch, start = self._position.tolist()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if self.loaded is not None:
            self.dataset.load_state_dict(self.loaded)
        return islice(self.dataset, start if self.loaded is None else 0, None)
