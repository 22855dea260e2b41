"""``LocalStepRandomBatchSampler``: random batches on each rank, determined by seed and step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.context import current, is_initialized
from asyncddp.data.epoch_position import check_state
from asyncddp.errors import ArgumentError

_NAME = "LocalStepRandomBatchSampler"
_SEED_STRIDE = 10_000  # between the seeds of two ranks


class LocalStepRandomBatchSampler(Sampler[list[int]]):
    r"""Sampler that draws each rank's batches from the whole data set, by seed and step.

    With B batches in a round, step s takes batch s mod B of the permutation that is drawn with the
    seed

    .. math:: \mathrm{base\_seed} + 10000 \cdot \mathrm{rank} + \lfloor s / B \rfloor.

    Ranks need not agree on anything: one that is faster, or whose batches are smaller, makes more
    steps. An iterator goes on from ``local_step`` to the end of the round, so that an epoch which
    was broken off is continued by the next ``for``.

    A ``DataLoader`` with workers draws batches ahead of their use. To resume with one, set
    ``local_step`` to the number of steps that were trained.

    Args:
        dataset: Anything with a length, which must not change.
        batch_size: Samples in a batch; ranks may differ.
        base_seed: The seed.
        rank: Whose batches; by default this rank, or 0 before ``init()``.
        drop_last: Whether to leave out the last batch of a round where it is smaller.

    Attributes:
        local_step: Batches drawn so far, which is the step that comes next; may be set.

    Raises:
        ArgumentError: A value that cannot be, or no batch at all.

    Example:
        >>> import asyncddp as bf
        >>> sampler = bf.LocalStepRandomBatchSampler(range(5), batch_size=2, base_seed=7)
        >>> len(sampler), [len(batch) for batch in sampler], sampler.local_step
        (3, [2, 2, 1], 3)
        >>> again = bf.LocalStepRandomBatchSampler(range(5), batch_size=2, base_seed=7)
        >>> again.load_state_dict(sampler.state_dict())
        >>> list(again) == list(sampler)
        True
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        base_seed: int,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if rank is None:
            rank = current().rank if is_initialized() else 0
        self._samples = len(dataset)
        self.batch_size = checked_integer(f"{_NAME}: argument batch_size", batch_size, 1)
        self.base_seed = checked_integer(f"{_NAME}: argument base_seed", base_seed)
        self.rank = checked_integer(f"{_NAME}: argument rank", rank, 0)
        self.drop_last = bool(drop_last)
        if not self._samples:
            raise ArgumentError(
                f"{_NAME}: argument dataset: expected at least one sample, got an empty one"
            )
        if not len(self):
            raise ArgumentError(
                f"{_NAME}: argument drop_last: with True, a round of {self._samples} samples has "
                f"no batch of batch_size={self.batch_size}; take drop_last=False or a batch_size "
                f"of at most {self._samples}"
            )
        self._step = 0
        self._drawn: tuple[int, list[int]] = (-1, [])

    @property
    def local_step(self) -> int:
        """Index of the next step, which is the number of batches drawn so far."""
        return self._step

    @local_step.setter
    def local_step(self, step: int) -> None:
        self._step = checked_integer(f"{_NAME}: argument local_step", step, 0)

    def __len__(self) -> int:
        """Return the number of batches in a round."""
        whole, rest = divmod(self._samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def batch(self, step: int) -> list[int]:
        """Return the sample indices of one step, independently of earlier draws.

        Args:
            step: The step, from 0 on.

        Raises:
            ArgumentError: It is below 0, or no whole number.
        """
        number, position = divmod(checked_integer(f"{_NAME}: argument step", step, 0), len(self))
        if self._drawn[0] != number:
            generator = torch.Generator()
            generator.manual_seed(self.base_seed + _SEED_STRIDE * self.rank + number)
            order = torch.randperm(self._samples, generator=generator, device="cpu").tolist()
            self._drawn = number, order
        start = position * self.batch_size
        return self._drawn[1][start : start + self.batch_size]

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches from ``local_step`` to the end of its round."""
        for _ in range(len(self) - self._step % len(self)):
            drawn = self.batch(self._step)
            self._step += 1
            yield drawn

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and the settings that determine the batches."""
        return {
            "local_step": self._step,
            "samples": self._samples,
            "batch_size": self.batch_size,
            "base_seed": self.base_seed,
            "rank": self.rank,
            "drop_last": self.drop_last,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from the saved state of a sampler with the same settings.

        Args:
            state_dict: What :meth:`state_dict` gave.

        Raises:
            ArgumentError: The settings differ, so that batches would differ.
        """
        caller, own = f"{_NAME}.load_state_dict", self.state_dict()
        remedy = "other batches; build the sampler as it was, or set local_step alone"
        check_state(caller, state_dict, own, ("local_step",), remedy)
        self.local_step = state_dict["local_step"]
