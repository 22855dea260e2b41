"""Samplers that give all ranks samples of similar complexity in each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.data.epoch_position import checked_replica, steps_of
from asyncddp.errors import ArgumentError

_NAME = "LoadBalancingDistributedSampler"
_BATCH_NAME = "LoadBalancingDistributedBatchSampler"


class LoadBalancingDistributedSampler(Sampler[int]):
    r"""Sampler that divides a data set among ranks such that a step takes all ranks equally long.

    Samples are sorted by complexity, such as the length of a sentence, and cut into chunks of as
    many as there are ranks. A chunk is a step, of which each rank takes one sample; the order of
    the chunks is drawn with the seed :math:`\mathrm{seed} + \mathrm{epoch}`, the same on all ranks.
    If chunks do not come out even, the last one has samples of the one before, too.

    Args:
        dataset: Anything with a length and an index.
        complexity_fn: Gives a sample's complexity, a number. It is called once for each sample, on
            every rank.
        num_replicas: Number of ranks; by default all of them, or 1 before ``init()``.
        rank: Whose samples; by default this rank, or 0 before ``init()``.
        shuffle: Whether to draw the order of chunks; without it chunks come from simple to complex.
        seed: The seed, the same on all ranks.
        drop_last: Whether samples that are too many for even chunks are left out, drawn anew in
            each epoch where ``shuffle`` is on.
        random_level: How far samples stray from their place in the order, from 0 to 1: noise of up
            to this part of the range of complexities is added to each, where ``shuffle`` is on.

    Attributes:
        epoch: The epoch, as set by :meth:`set_epoch`.

    Raises:
        ArgumentError: A value that cannot be, or no sample for each rank.

    Example:
        >>> import asyncddp as bf
        >>> words = ["of", "a", "matching", "rank", "scheduler", "the"]
        >>> for rank in (0, 1):
        ...     sampler = bf.LoadBalancingDistributedSampler(
        ...         words, complexity_fn=len, num_replicas=2, rank=rank, shuffle=False
        ...     )
        ...     [words[index] for index in sampler]
        ['a', 'the', 'matching']
        ['of', 'rank', 'scheduler']
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[..., float],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0.0,
    ) -> None:
        self.num_replicas, self.rank = checked_replica(_NAME, num_replicas, rank)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.seed = checked_integer(f"{_NAME}: argument seed", seed)
        if not 0.0 <= random_level <= 1.0:
            raise ArgumentError(
                f"{_NAME}: argument random_level: expected a number from 0 to 1, got "
                f"{random_level!r}"
            )
        self.random_level = random_level
        self._complexities = _complexities(dataset, complexity_fn)
        if not len(self):
            raise ArgumentError(
                f"{_NAME}: argument dataset: expected a sample for each of {self.num_replicas} "
                f"ranks, got {len(self._complexities)}" + "; take drop_last=False" * self.drop_last
            )
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order; call it on all ranks before each epoch.

        Args:
            epoch: Its number.

        Raises:
            ArgumentError: It is no whole number.
        """
        self.epoch = checked_integer(f"{_NAME}.set_epoch: argument epoch", epoch)

    def __len__(self) -> int:
        """Return the number of samples of each rank."""
        return steps_of(len(self._complexities), self.num_replicas, self.drop_last)

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's indices in the epoch."""
        return iter([chunk[self.rank] for chunk in self._chunks()])

    def _chunks(self) -> list[list[int]]:
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        ranks, count = self.num_replicas, len(self)
        order = self._sorted(generator, count * ranks)
        while len(order) < ranks:  # fewer samples than ranks
            order += order
        chunks = [order[start : start + ranks] for start in range(0, len(order), ranks)][:count]
        if len(chunks[-1]) < ranks:
            chunks[-1] = order[-ranks:]
        if self.shuffle:
            places = torch.randperm(count, generator=generator, device="cpu").tolist()
            chunks = [chunks[place] for place in places]
        return chunks

    def _sorted(self, generator: torch.Generator, most: int) -> list[int]:
        """Return at most ``most`` indices, sorted by complexity; ties keep the random order."""
        values = self._complexities
        if not self.shuffle:
            return sorted(range(len(values))[:most], key=values.__getitem__)
        order = torch.randperm(len(values), generator=generator, device="cpu").tolist()[:most]
        spread = (max(values) - min(values)) * self.random_level
        noise = torch.rand(len(values), generator=generator, dtype=torch.float64, device="cpu")
        keys = [value + spread * extra for value, extra in zip(values, noise.tolist(), strict=True)]
        return sorted(order, key=keys.__getitem__)


def _complexities(dataset: Any, complexity_fn: Callable[..., float]) -> list[float]:
    found: list[float] = []
    for index in range(len(dataset)):
        value = complexity_fn(dataset[index])
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ArgumentError(
                f"{_NAME}: argument complexity_fn: expected a finite number for each sample, got "
                f"{value!r} for sample {index}"
            )
        found.append(number)
    return found


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Load-balancing batch sampler: all ranks get equally many batches, whose sizes may differ.

    A function of yours makes batches of a rank's samples, for example of equally many tokens. Ranks
    with fewer batches than others repeat their first ones, or with ``drop_last`` those with more
    leave out the last. Every rank makes the batches of all ranks, to know how many they are.

    Args:
        sampler: The sampler that divides the data set among ranks.
        batch_fn: Gives a list of batches, lists of indices, for a list of indices; by these alone.
        drop_last: Whether to leave out batches, in place of repeating some.

    Raises:
        ArgumentError: Another kind of sampler.

    Example:
        >>> import asyncddp as bf
        >>> def pairs(indices):
        ...     return [indices[start : start + 2] for start in range(0, len(indices), 2)]
        >>> sampler = bf.LoadBalancingDistributedSampler(
        ...     range(6), lambda sample: sample, num_replicas=2, rank=1, shuffle=False
        ... )
        >>> list(bf.LoadBalancingDistributedBatchSampler(sampler, pairs))
        [[1, 3], [5]]
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], Sequence[Sequence[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ArgumentError(
                f"{_BATCH_NAME}: argument sampler: expected a {_NAME}, got {type(sampler).__name__}"
            )
        self.sampler, self.batch_fn, self.drop_last = sampler, batch_fn, bool(drop_last)
        self._made: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler; see :meth:`LoadBalancingDistributedSampler.set_epoch`."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches of each rank in the epoch."""
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over this rank's batches in the epoch."""
        return iter(self._batches())

    def _batches(self) -> list[list[int]]:
        if self._made is None or self._made[0] != self.sampler.epoch:
            self._made = self.sampler.epoch, self._equalised()
        return self._made[1]

    def _equalised(self) -> list[list[int]]:
        chunks = self.sampler._chunks()
        counts = []
        for rank in range(self.sampler.num_replicas):
            batches = self.batch_fn([chunk[rank] for chunk in chunks])
            counts.append(len(batches))
            if rank == self.sampler.rank:
                own = [list(batch) for batch in batches]
        if min(counts) == 0:
            raise ArgumentError(
                f"{_BATCH_NAME}: argument batch_fn: expected at least one batch for each rank, got "
                f"none for rank {counts.index(0)}"
            )
        count = min(counts) if self.drop_last else max(counts)
        return [own[place % len(own)] for place in range(count)]
