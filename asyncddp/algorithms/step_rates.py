"""How often ranks step: by which factor updates are scaled so that all ranks count alike."""

from __future__ import annotations

from contextlib import suppress

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import PeerLeftError
from asyncddp.memory.allocate import copied, values, zeros, zeros_like
from asyncddp.ops.windows import create_along
from asyncddp.windows import Window, windows_of
from asyncddp.windows.departures import CONCLUDED, Departures
from topology import Schedule

__all__ = ["StepRates"]

_LARGEST = 4.0
"""The largest factor by which an update is scaled."""
_EVERY = 4
"""Steps from one look at the others' counts to the next."""
_FIRST, _MEMORY = 4, 200
"""Steps for which rates are taken to be equal at first, and over which they are averaged."""
_JUMP = 32.0
"""Steps of another rank to one of this one that count at most, in multiples of its rate."""


class StepRates:
    r"""Counts the steps of all ranks, and scales updates where ranks differ in speed.

    With :math:`r_j` how many steps rank j makes to one of this rank, averaged over some 200 steps,
    an update is scaled by

    .. math:: s_i = \min\Big(\tfrac1n \sum_j r_j,\ 4 \min_j r_j\Big),

    so that :math:`s_i` times its rate is the same on all ranks: that of their mean, or less where a
    rank is so slow that its updates would be scaled by more than 4. Ranks that have left do not
    count. Counts travel through a window of their own, one number for each rank, and each rank
    passes on the largest that it has seen.

    Args:
        context: The world.
        label: Begins the window's name.
        schedule: The topology along which it lies.

    Attributes:
        scale: :math:`s_i`.
        name: The window's.

    References:
        Assran and Rabbat, "Asynchronous gradient push", IEEE TAC 66(1), 2021, on the optimum that
        ranks of different rates tend to, and on step sizes in inverse proportion to them.
    """

    def __init__(self, context: Context, label: str, schedule: Schedule) -> None:
        self._context, self.name = context, f"{label}.steps"
        self.scale = 1.0
        self._made = 0
        self._counts = zeros((context.size,), torch.float64)
        self._rates = values([1.0] * context.size, torch.float64)
        self._departures = Departures(context.engine.has_left)
        with use(context):
            create_along(schedule, zeros_like(self._counts), self.name, zero_init=True)

    @property
    def _window(self) -> Window:
        return windows_of(self._context).find("DistributedOptimizer", self.name)

    def count(self) -> None:
        """Count a step of this rank; now and then tell neighbours, and see how many others made."""
        self._made += 1
        if self._made % _EVERY:
            return
        window, before = self._window, copied(self._counts)
        for source in window.edges.incoming:
            with suppress(PeerLeftError):  # it has ended, and its last counts were never read
                torch.maximum(self._counts, window.peek(source), out=self._counts)
        self._counts[self._context.rank] = self._made
        told = dict.fromkeys(window.edges.outgoing, 1.0)
        window.put(self._counts, 1.0, told, add=False, with_p=False, step=self._made)
        self._adapt((self._counts - before) / _EVERY)

    def _adapt(self, steps: torch.Tensor) -> None:
        """Take the steps into account that ranks have made to one of this rank."""
        rates = self._rates
        steps = torch.minimum(steps, _JUMP * rates.clamp(min=1.0))
        rates.lerp_(steps, _EVERY * max(1.0 / (self._made + _FIRST), 1.0 / _MEMORY))
        every = {rank: int(count) for rank, count in enumerate(self._counts.tolist())}
        left = self._departures.look(CONCLUDED - 1, every)
        gone = {*left} - {self._context.rank}
        found = [rate for rank, rate in enumerate(rates.tolist()) if rank not in gone]
        self.scale = min(sum(found) / len(found), _LARGEST * min(found))
