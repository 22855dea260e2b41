"""``ElasticSampler``: divides what is left of an epoch anew when ranks die, leave or join."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from asyncddp.algorithms.wrapper_setup import next_label
from asyncddp.context import current
from asyncddp.data.epoch_position import steps_of
from asyncddp.data.stateful_sampler import StatefulDistributedSampler
from asyncddp.errors import ArgumentError
from asyncddp.membership import View


class ElasticSampler(StatefulDistributedSampler):
    r"""Sampler whose indices are divided anew among the ranks when some die, leave or join.

    With all ranks from the start to the end these are the indices of
    :class:`StatefulDistributedSampler`. When members change in mid-epoch, those that are there
    agree on what each has drawn, and divide what is left among themselves, so that all ranks end
    the epoch after equally many draws. So no index is left out, and none is drawn twice, but for
    those that fill up the last row. A rank that has died counts as having drawn as much as the one
    that has drawn most: what it had in hand, or its workers had drawn ahead, is lost.

    Give it to ``ElasticState(model, optimizer, sampler=sampler)``, from which a replacement takes
    the position in the epoch. Its counts are those of ranks that wait for each other: with
    asynchronous methods the share of a dead rank is known less exactly.

    Args:
        dataset: Anything with a length, which must not change, or the number of samples.
        shuffle: Whether to draw a permutation for each epoch; without it indices ascend.
        seed: The seed, the same on all ranks.
        drop_last: Whether to leave out indices in place of repeating some.

    Attributes:
        epoch: The epoch, from 0 on.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: A value that cannot be.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2, elastic=True) as world:
        ...     world.run(lambda: list(bf.ElasticSampler(6, shuffle=False)))
        [[0, 2, 4], [1, 3, 5]]
    """

    def __init__(
        self, dataset: Sized | int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        super().__init__(dataset, 1, 0, shuffle, seed, drop_last)
        self._context = current()
        self.num_replicas, self.rank = self._context.size, self._context.rank
        self._label = next_label(self._context, "sampler")
        self._begin([])

    @override
    def __len__(self) -> int:
        """Return the number of indices of each rank in a whole epoch, with the ranks of now."""
        here = getattr(self, "_context", None)  # none yet where the arguments are checked
        return steps_of(self._samples, 1 if here is None else here.size, self.drop_last)

    @override
    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's indices, from where it is in the epoch."""
        while True:
            self._follow()
            share = self._shares.get(self.rank, ())
            if self._taken >= len(share):
                break
            self._taken += 1
            yield int(share[self._taken - 1])
        self._place(self.epoch + 1)

    def _follow(self) -> None:
        """Count a draw, and divide what is left by all views that have begun before it."""
        engine = self._context.engine
        while True:
            number = self._drawn.get(self.rank, 0) + self._taken
            view = engine.begin_round(self._name(self.rank), number)
            if self._shares and (view is None or view.number == self._view):
                return
            if not self._shares:
                members = range(self._context.size) if view is None else view.members
                self._divide(members, 0 if view is None else view.number)
            self._catch_up()

    def _catch_up(self) -> None:
        """Divide what is left anew by each view that has begun since the last one."""
        for view in self._context.engine.views_after(self._view) if self._shares else ():
            self._close(self._counts(view))
            self._divide(view.members, view.number)

    def _name(self, rank: int, epoch: int | None = None) -> str:
        epoch = self.epoch if epoch is None else epoch
        return f"<indices of {self._label} in epoch {epoch} on rank {rank}>"

    def _counts(self, view: View) -> dict[int, int]:
        """Return how many indices of its share each rank has drawn when a view begins."""
        known = {
            rank: view.starts[self._name(rank)] - self._drawn[rank]
            for rank in self._shares
            if self._name(rank) in view.starts
        }
        most = max(known.values(), default=self._taken)
        return {
            rank: min(max(0, known.get(rank, most)), len(share))
            for rank, share in self._shares.items()
        }

    def _begin(self, history: Sequence[Mapping[int, int]]) -> None:
        """Begin the epoch, and repeat the divisions of it that are over."""
        self._left = self._order = self._whole_epoch()
        self._drawn: dict[int, int] = {}
        self._shares: dict[int, npt.NDArray[Any]] = {}
        self._history: list[Mapping[int, int]] = []
        self._taken, self._view = 0, -1
        for counts in history:
            self._divide(list(counts), -1)
            self._close(counts)
        if history:
            self._shares = {}

    def _divide(self, members: Sequence[int], view: int) -> None:
        """Divide what is left, so that all members have drawn equally many in the end."""
        most = max(self._drawn.values(), default=0)
        self._drawn = {rank: self._drawn.get(rank, most) for rank in members}
        every = len(self._left) + sum(self._drawn.values())
        last = max(most, steps_of(every, len(members), self.drop_last))
        sizes = [last - drawn for drawn in self._drawn.values()]
        turns = np.concatenate([np.arange(last - size, last) for size in sizes])
        owners = np.repeat(np.arange(len(members)), sizes)[np.argsort(turns, kind="stable")]
        spare = np.resize(self._order, max(0, len(owners) - len(self._left)))
        dealt = np.append(self._left, spare)[: len(owners)]
        self._shares = {rank: dealt[owners == place] for place, rank in enumerate(members)}
        self._view, self.num_replicas = view, len(members)

    def _close(self, counts: Mapping[int, int]) -> None:
        """Take what each rank has drawn of its share out of what is left."""
        taken = [share[: counts[rank]] for rank, share in self._shares.items()]
        self._left = self._left[~np.isin(self._left, np.concatenate(taken))]
        self._drawn = {rank: drawn + counts[rank] for rank, drawn in self._drawn.items()}
        self._history.append(dict(counts))
        self._taken = 0

    @override
    def _place(self, epoch: int, start: int = 0) -> None:
        over = self._name(self.rank, self.epoch - 1)  # the one before is over on all ranks
        super()._place(epoch, start)
        self._begin([])
        self._context.engine.forget_uses(over)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the settings, and how many indices each rank has drawn, in plain form.

        A loader that draws ahead makes it count more than the loop has received.
        """
        self._catch_up()
        now = [dict.fromkeys(self._shares, self._taken)] if self._shares else []
        every = (*self._history, *now)
        history = [[list(pair) for pair in one.items()] for one in every]
        consumed = sum(sum(one.values()) for one in every)
        return {**super().state_dict(), "consumed": consumed, "history": history}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume in mid-epoch from a saved state; the ranks may be others.

        Args:
            state_dict: What :meth:`state_dict` gave.

        Raises:
            ArgumentError: The settings differ, so that samples would come in another order.
        """
        try:
            history = [{int(r): int(n) for r, n in one} for one in state_dict["history"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                "ElasticSampler.load_state_dict: expected the state of an ElasticSampler, with "
                "pairs of rank and number in an entry 'history', got "
                f"{state_dict.get('history', sorted(state_dict))!r}"
            ) from error
        super().load_state_dict(state_dict)
        self._begin(history)
