"""Estimation of the ranks' step rates, which scales updates to give all ranks equal weight."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import PeerLeftError
from asyncddp.ops.windows.creation import create_along
from asyncddp.tensors.allocation import detached_copy, make_tensor, zeros, zeros_like
from asyncddp.topology import Schedule
from asyncddp.windows import windows_of
from asyncddp.windows.departure_detector import CONCLUDED, DepartureDetector

_LARGEST = 4.0
"""Maximum factor by which an update is scaled."""
_EVERY = 4
"""Steps between two exchanges of counts."""
_FIRST, _MEMORY = 4, 200
"""Initial number of steps with rates assumed equal; averaging window of rates in steps."""
_JUMP = 32.0
"""Upper bound of a new rate, in multiples of the rank's current rate."""


class StepRateEstimator:
    r"""Estimator of the ranks' step rates, which scales updates to give all ranks equal weight.

    With :math:`r_j` the steps that rank j makes per step of this rank, averaged over some 200
    steps, an update is scaled by

    .. math:: s_i = \min\Big(\tfrac1n \sum_j r_j,\ 4 \min_j r_j\Big),

    so that :math:`s_i` times its rate is the same on all ranks. Departed ranks are ignored. Step
    counts are exchanged through a separate window, one number per rank, and each rank forwards the
    largest counts that it has seen.

    References:
        Assran and Rabbat, "Asynchronous gradient push", IEEE TAC 66(1), 2021.
    """

    def __init__(self, context: Context, label: str, schedule: Schedule) -> None:
        self._context, self.name = context, f"{label}.steps"
        self.scale = 1.0
        self._made = 0
        self._counts = zeros((context.size,), torch.float64)
        self._step_rates = make_tensor([1.0] * context.size, torch.float64)
        self._departures = DepartureDetector(context.engine.has_exited, context.engine.has_failed)
        with use(context):
            create_along(schedule, zeros_like(self._counts), self.name, zero_init=True)

    def count(self) -> None:
        """Count a step of this rank; every few steps, exchange counts and update the scale."""
        self._made += 1
        if self._made % _EVERY:
            return
        window = windows_of(self._context).find("DistributedOptimizer", self.name)
        before = detached_copy(self._counts)
        for source in window.edges.incoming:
            with suppress(PeerLeftError):  # it has ended, and its last counts were never read
                torch.maximum(self._counts, window.read_buffer(source), out=self._counts)
        self._counts[self._context.rank] = self._made
        weights = dict.fromkeys(window.edges.outgoing, 1.0)
        window.put(self._counts, 1.0, weights, add=False, with_p=False, step=self._made)
        self._adapt((self._counts - before) / _EVERY)

    def _adapt(self, steps: torch.Tensor) -> None:
        """Update rates and scale from each rank's number of steps per step of this rank."""
        rates = self._step_rates
        steps = torch.minimum(steps, _JUMP * rates.clamp(min=1.0))
        rates.lerp_(steps, _EVERY * max(1.0 / (self._made + _FIRST), 1.0 / _MEMORY))
        every = {rank: int(count) for rank, count in enumerate(self._counts.tolist())}
        left = self._departures.look(CONCLUDED - 1, every)
        gone = {*left} - {self._context.rank}
        found = [rate for rank, rate in enumerate(rates.tolist()) if rank not in gone]
        self.scale = step_scale(found)


def step_scale(rates: Sequence[float]) -> float:
    """Return the factor for a rank's updates, by the steps that ranks make per step of its own."""
    return min(sum(rates) / len(rates), _LARGEST * min(rates))
