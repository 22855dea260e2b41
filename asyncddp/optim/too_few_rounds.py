"""Warning that an algorithm with a long averaging interval has hardly averaged in a run."""

from __future__ import annotations

import logging

from asyncddp.algorithms.phases import PhaseConfig

logger = logging.getLogger("asyncddp")

_FEW = 10
_STRONG = 0.9


class RoundsWarning:
    """Counter of steps and averaging rounds, which warns once on rank 0 if rounds were too few.

    It warns if the whole model was never averaged, or was averaged fewer than ten times by a method
    with a momentum of 0.9 or more between rounds.
    """

    def __init__(self) -> None:
        self._watched = False

    def begin(self, config: PhaseConfig, since: int) -> None:
        """Start counting for a method in use since step ``since`` of its wrapper."""
        averager, method = config.averager, config.averager.algorithm
        averages = averager.communication.how is not None and not averager.single_rank
        self._watched = averages and config.passes_per_round > 1 and averager.context.rank == 0
        self._since, self._steps = since, 0
        self._rounds, self._hidden = averager.round, int(method.hidden_rounds)
        self._rounds_of_each = method.fragments * (1 + self._hidden)
        self._who = f"{averager.label}: {method.name}"
        unit = "communication_interval" if config.counts_steps else "num_steps_per_communication"
        self._interval = f"{unit}={config.passes_per_round}"
        if method.fragments > 1:
            self._interval += f", fragments={method.fragments}"
        self._option = method.rounds_momentum
        self._momentum = 0.0 if self._option is None else getattr(method, self._option)

    def count(self, steps: int, rounds: int) -> None:
        """Record the total numbers of steps and rounds."""
        self._steps, self._rounds = steps - self._since, rounds

    def tell(self) -> None:
        """Warn if there were too few rounds, unless already warned."""
        watched = self._watched and self._steps
        averages = (self._rounds + self._hidden) // self._rounds_of_each if watched else _FEW
        if averages >= _FEW or (averages and self._momentum < _STRONG):
            return
        self._watched = False
        if averages:
            logger.warning(
                "%s has averaged %d times in %d steps, with %s and %s=%s: momentum so strong needs "
                "more rounds than %d, and costs more than it gains. Let it average more often, or "
                "give %s=0.5",
                *(self._who, averages, self._steps, self._interval, self._option, self._momentum),
                *(_FEW, self._option),
            )
        else:
            logger.warning(
                "%s has not averaged the whole model once in %d steps, with %s: the ranks have "
                "models of their own. Let it average more often, ten times in a run or more",
                *(self._who, self._steps, self._interval),
            )
