"""``des_loc``: local steps, with separate averaging intervals of parameters and moments."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.wrapper_setup import checked_integer, checked_interval
from asyncddp.errors import ArgumentError

_PARAMETERS = "parameters"
_USUAL = {"exp_avg": ("betas", 3), "exp_avg_sq": ("betas", 6), "momentum_buffer": ("momentum", 3)}
"""Option of optimizers that keep a moment, and its interval in units of H, keyed by moment."""


class DesLoc(Algorithm):
    r"""DES-LOC: local steps, with separate averaging intervals of parameters and each moment.

    .. math:: x_i \leftarrow \frac1n \sum_j x_j \ \text{every}\ H, \qquad
              u_i \leftarrow \frac1n \sum_j u_j \ \text{every}\ K_u, \qquad
              v_i \leftarrow \frac1n \sum_j v_j \ \text{every}\ K_v\ \text{steps}

    with u and v state tensors of the user's optimizer, such as Adam's moments, which change the
    more slowly the larger their betas are: with :math:`K_u = 3 H, K_v = 6 H` a round sends 1.5
    models on average. Averages are computed after a step and used in the next. The method has no
    state itself. A missing state of a parameter counts as zero.

    Args:
        communication_interval: H, in steps of the optimizer, not backward passes.
        state_intervals: K by the names of tensors in the optimizer's ``state``, such as
            ``{"exp_avg": 96, "exp_avg_sq": 192}``; None for 3 H for ``exp_avg`` and
            ``momentum_buffer`` and 6 H for ``exp_avg_sq``, as far as the optimizer has them.

    Raises:
        ArgumentError: An interval below 1.

    References:
        Iacob et al., "DES-LOC: desynced low communication adaptive optimizers for training
        foundation models", 2025.
    """

    name = "des_loc"
    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.GLOBAL,)
    averages_first_step = False

    def __init__(
        self,
        *,
        communication_interval: int = 32,
        state_intervals: Mapping[str, int] | None = None,
    ) -> None:
        self._model_interval = checked_interval(communication_interval)
        self.state_intervals = (
            None if state_intervals is None else _checked_intervals(state_intervals)
        )
        given = (self.state_intervals or {}).values()
        self.communication_interval = math.gcd(self._model_interval, *given)

    @override
    def takes_part(self, bucket: AveragedBucket) -> bool:
        return bool(self._due(bucket))

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        return _tensor(bucket, self._due(bucket)[0])

    @override
    def travelling_state(self, bucket: AveragedBucket) -> Mapping[str, torch.Tensor]:
        return {key: _tensor(bucket, key) for key in self._due(bucket)[1:]}

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        averages = {self._due(bucket)[0]: received.mixed, **received.states}
        for key, average in averages.items():
            if key == _PARAMETERS:
                bucket.flat.copy_(average)
            else:
                bucket.set_optimizer_state(key, average)

    def _due(self, bucket: AveragedBucket) -> list[str]:
        """List the names of the tensors that the current round averages."""
        assert self.communication_interval is not None
        steps = (bucket.round + 1) * self.communication_interval
        intervals = {_PARAMETERS: self._model_interval, **self._intervals_of(bucket)}
        return [key for key, interval in intervals.items() if steps % interval == 0]

    def _intervals_of(self, bucket: AveragedBucket) -> Mapping[str, int]:
        """Return the averaging intervals of the optimizer's state tensors, by name."""
        if self.state_intervals is not None:
            return self.state_intervals
        groups = bucket.optimizer.param_groups
        return {
            key: times * self._model_interval
            for key, (option, times) in _USUAL.items()
            if any(group.get(option) for group in groups)
        }


def _tensor(bucket: AveragedBucket, key: str) -> torch.Tensor:
    return bucket.flat if key == _PARAMETERS else bucket.optimizer_state(key)


def _checked_intervals(given: Any) -> dict[str, int]:
    if not isinstance(given, Mapping):
        raise ArgumentError(
            "argument state_intervals: expected a mapping such as {'exp_avg': 96} from names in "
            f"the optimizer's state to steps, got {given!r}"
        )
    return {
        str(key): checked_integer(f"argument state_intervals: {key!r}", steps, 1)
        for key, steps in given.items()
    }
