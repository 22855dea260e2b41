"""Counter of backward passes that decides in which optimizer step to average."""

from __future__ import annotations


class AccumulationCounter:
    """Counter of backward passes: ranks average after every ``passes_per_round`` of them.

    One rule serves both uses of ``num_steps_per_communication=J``. The unit is the backward pass; a
    ``step()`` counts at least one, whatever it did. So J times backward and step average in the
    J-th step ("local SGD"), and J times backward with one step average in that step (accumulation).

    Args:
        passes_per_round: J.

    Attributes:
        carried_passes: Passes of earlier steps since the last averaging.
        current_passes: Passes since the last step, as the most gradients that one parameter got.

    Example:
        >>> counter = AccumulationCounter(passes_per_round=2)
        >>> counter.record(0), counter.due(), counter.end(averaged=False)
        (1, False, None)
        >>> counter.record(0), counter.due()
        (1, True)
    """

    def __init__(self, passes_per_round: int) -> None:
        self.passes_per_round = passes_per_round
        self.carried_passes = 0
        self.current_passes = 0
        self._gradient_counts: dict[int, int] = {}

    def record(self, parameter: int) -> int:
        """Count a gradient of a parameter; return how many it got since the last step."""
        count = self._gradient_counts.get(parameter, 0) + 1
        self._gradient_counts[parameter] = count
        self.current_passes = max(self.current_passes, count)
        return count

    def due(self, more: int = 0) -> bool:
        """Return whether the step after ``more`` further passes is one that averages."""
        return self.carried_passes + max(1, self.current_passes + more) >= self.passes_per_round

    def end(self, *, averaged: bool) -> None:
        """Record that a step has ended, and whether it averaged."""
        self.carried_passes = 0 if averaged else self.carried_passes + max(1, self.current_passes)
        self.current_passes = 0
        self._gradient_counts.clear()
