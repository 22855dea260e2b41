"""Averaging that goes on through forward, backward and step; its change is added afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncddp.algorithms.rhythms.base import Closure, Update
from asyncddp.algorithms.rhythms.before_forward import BeforeForward
from asyncddp.memory.allocate import empty_like

__all__ = ["ThroughStep"]


class ThroughStep(BeforeForward):
    r"""The rhythm of ``async_model_average``: nothing that is learnt meanwhile is lost.

    The first training forward after an averaging sends a copy s of the parameters, and where there
    was none, ``step()`` does. All steps up to the next averaging go on with the parameters x. Then
    what the average has changed in the copy is added:

    .. math:: x \leftarrow (x - s) + \mathrm{mix}(s)
    """

    _copies: Sequence[torch.Tensor] = ()
    _copied: Sequence[object] | None = None

    def flats(self) -> list[torch.Tensor]:
        """The copies; they have room of their own."""
        if self._copied is not self.buckets:
            self._copies = [empty_like(bucket.flat) for bucket in self.buckets]
            self._copied = self.buckets
        return list(self._copies)

    def _wanted(self) -> bool:
        return True

    def _skip(self) -> None:
        due = self.passes.due()
        self._end(averaged=due and self._install())

    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Step, then add what the average has changed."""
        del scaled
        averaged = self.passes.due()
        self._stepping = True
        try:
            if self._round is None:
                self._start()
            loss = update(closure)
            if averaged:
                self._install()
        finally:
            self._stepping = False
        self._end(averaged=averaged)
        return loss

    def _start(self) -> None:
        self.refresh()
        self._round = self.setting.mixer.begin()
        if self._round is None:
            return
        for index, (bucket, copy) in enumerate(zip(self.buckets, self.flats(), strict=True)):
            copy.copy_(bucket.flat)
            self._round.start(index, copy)

    def _install(self) -> bool:
        """Add what the average has changed, if one is under way; whether one was."""
        under_way, buckets = self._round, self.buckets
        self._round = None
        self.refresh()
        if under_way is None or self.buckets is not buckets:  # it was about others
            return False
        pairs = list(zip(buckets, self.flats(), strict=True))
        for bucket, copy in pairs:
            bucket.flat.sub_(copy)
        try:
            under_way.install()
        finally:
            for bucket, copy in pairs:
                bucket.flat.add_(copy)
        return True

    def settle(self) -> None:
        """Wait until nobody reads the copies any more; the parameters are never read."""
        if self._round is not None:
            self._round.settle()
