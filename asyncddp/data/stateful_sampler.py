"""``StatefulDistributedSampler``: shuffles and shards a data set per epoch; can be resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.data.epoch_position import EpochPosition, checked_replica, steps_of
from asyncddp.errors import ArgumentError

_NAME = "StatefulDistributedSampler"


class StatefulDistributedSampler(EpochPosition, Sampler[int]):
    r"""Sampler that divides a data set, or a range of indices, among ranks; resumes in mid-epoch.

    With N samples and n ranks, rank r takes of the permutation :math:`\pi` of the epoch

    .. math:: \pi_r, \pi_{r+n}, \pi_{r+2n}, \dots

    which is drawn with the seed :math:`\mathrm{seed} + \mathrm{epoch}`: these are the indices of
    ``torch.utils.data.DistributedSampler``. Each rank has :math:`\lceil N/n \rceil` of them, where
    the first ones of the epoch are repeated, or with ``drop_last`` :math:`\lfloor N/n \rfloor`.

    The epoch advances by itself when an iterator ends. An iterator that is broken off does not
    advance it: the next one begins where the former did. After :meth:`load_state_dict` iterators
    begin where the state was taken. On as many ranks that gives the very indices that were left;
    on m others each index that is left of the epoch goes to one of them,
    :math:`\pi_{c+r}, \pi_{c+r+m}, \dots`, with c the indices that all ranks had consumed. All ranks
    count as having consumed as many as the one whose state it is.

    Inside a ``DataLoader`` with workers indices are drawn ahead of their use, so that the state is
    ahead, too: :func:`prepare_data_loader` counts what the loop has received.

    Args:
        dataset: Anything with a length, which must not change, or the number of samples.
        num_replicas: Number of ranks, n; by default all of them, or 1 before ``init()``.
        rank: Whose indices; by default this rank, or 0 before ``init()``.
        shuffle: Whether to draw a permutation for each epoch; without it indices ascend.
        seed: The seed, the same on all ranks.
        drop_last: Whether to leave out indices in place of repeating some.
        partition: The indices of each rank, as from :mod:`asyncddp.data.partition`, where ranks
            have data of their own. Each rank goes through its own ones; smaller
            parts begin again until they are as long as the largest, or with ``drop_last`` all are
            cut to the smallest.
            Such an epoch is resumed on as many ranks only.

    Attributes:
        epoch: The epoch, from 0 on.

    Raises:
        ArgumentError: A value that cannot be, or no index for each rank.

    Example:
        >>> import asyncddp as bf
        >>> samplers = [bf.StatefulDistributedSampler(6, 2, rank, False) for rank in (0, 1)]
        >>> [list(sampler) for sampler in samplers]
        [[0, 2, 4], [1, 3, 5]]
        >>> for index in samplers[0]:  # of epoch 1
        ...     state = samplers[0].state_dict()
        ...     break
        >>> state["epoch"], state["consumed"]
        (1, 2)
        >>> alone = bf.StatefulDistributedSampler(6, shuffle=False)
        >>> alone.load_state_dict(state)
        >>> list(alone), alone.epoch
        ([2, 3, 4, 5], 2)
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        partition: Sequence[npt.ArrayLike] | None = None,
    ) -> None:
        self.num_replicas, self.rank = checked_replica(_NAME, num_replicas, rank)
        length = len(dataset) if isinstance(dataset, Sized) else dataset
        self._samples = checked_integer(f"{_NAME}: argument dataset", length, 0)
        self.seed = checked_integer(f"{_NAME}: argument seed", seed)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self._parts = None if partition is None else self._checked_parts(partition)
        numbers = {"samples": self._samples, "seed": self.seed, "shuffle": self.shuffle}
        self._settings = {**numbers, "parts": len(self._parts or ())}
        if not len(self):
            raise ArgumentError(
                f"{_NAME}: argument dataset: expected a sample for each of {self.num_replicas} "
                f"ranks, got {self._samples}" + "; take drop_last=False" * self.drop_last
            )

    def _checked_parts(self, partition: Sequence[npt.ArrayLike]) -> list[npt.NDArray[Any]]:
        parts = [np.asarray(part) for part in partition]
        wrong = [part for part in parts if not _indices(part, self._samples)]
        if wrong or len(parts) != self.num_replicas:
            raise ArgumentError(
                f"{_NAME}: argument partition: expected indices from 0 to {self._samples - 1} for "
                f"each of {self.num_replicas} ranks, as partition.uniform({self._samples}, "
                f"{self.num_replicas}) has them, got {len(parts)} parts"
                + "".join(f", {part!r} among them" for part in wrong[:1])
            )
        return parts

    def __len__(self) -> int:
        """Return the number of indices of each rank in a whole epoch."""
        if self._parts is not None:
            return (min if self.drop_last else max)(len(part) for part in self._parts)
        return steps_of(self._samples, self.num_replicas, self.drop_last)

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's indices, from the epoch's start or the loaded position."""
        self._consumed = self._start
        for index in self._rest().tolist():
            self._consumed += self.num_replicas
            yield index
        self._place(self.epoch + 1)

    def _rest(self) -> npt.NDArray[Any]:
        """Return this rank's indices in the rest of the epoch."""
        ranks, start = self.num_replicas, self._start
        order = self._whole_epoch()
        if self._parts is not None:
            return np.resize(order, len(self))[start // ranks :]
        rest = order[start:]
        count = steps_of(len(rest), ranks, self.drop_last) * ranks
        rest = np.append(rest, np.resize(order, max(0, count - len(rest))))
        return rest[self.rank : count : ranks]

    def _whole_epoch(self) -> npt.NDArray[Any]:
        """Return the indices of the epoch, of this rank alone where it has a part of its own."""
        order = np.arange(self._samples) if self._parts is None else self._parts[self.rank]
        if not self.shuffle:
            return order
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        permutation = torch.randperm(len(order), generator=generator, device="cpu").numpy()
        return np.take(order, permutation)


def _indices(part: npt.NDArray[Any], samples: int) -> bool:
    """Return whether an array is a non-empty vector of indices of the samples."""
    whole = part.ndim == 1 and part.size > 0 and part.dtype.kind in "iu"
    return whole and part.min() >= 0 and part.max() < samples
