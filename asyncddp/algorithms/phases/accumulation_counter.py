"""Counter of backward passes, which determines the steps in which ranks average."""

from __future__ import annotations


class AccumulationCounter:
    """Counter of backward passes: averaging is due after every ``passes_per_round`` passes.

    One rule serves both uses of ``num_steps_per_communication=J``. The unit is the backward pass; a
    ``step()`` counts as at least one. So J times backward and step average in the J-th step ("local
    SGD"), and J times backward with one step average in that step (accumulation). With
    ``counts_steps`` each step counts as one, for methods with an interval of their own.

    Attributes:
        carried_passes: Passes of earlier steps since the last averaging.
        current_passes: Passes since the last step: the maximum over parameters.
        held: Whether gradients only accumulate for now, so that no averaging is due.

    Example:
        >>> counter = AccumulationCounter(passes_per_round=2)
        >>> counter.record(0), counter.due(), counter.end(averaged=False)
        (None, False, None)
        >>> counter.record(0), counter.due()
        (None, True)
    """

    def __init__(self, passes_per_round: int, *, counts_steps: bool = False) -> None:
        self.passes_per_round, self._counts_steps = passes_per_round, counts_steps
        self.carried_passes = self.current_passes = 0
        self.held = False
        self._passes_of: dict[int, int] = {}

    def record(self, parameter: int) -> None:
        """Count a pass in which a parameter got a gradient."""
        count = self._passes_of[parameter] = self._passes_of.get(parameter, 0) + 1
        self.current_passes = max(self.current_passes, count)

    def due(self, more: int = 0) -> bool:
        """Return whether the next step averages, if ``more`` further passes precede it."""
        return not self.held and self._passes_with(more) >= self.passes_per_round

    def _passes_with(self, more: int = 0) -> int:
        passes = 1 if self._counts_steps else max(1, self.current_passes + more)
        return self.carried_passes + passes

    @property
    def complete(self) -> bool:
        """True if enough passes were made since the last step to average in this one."""
        return not self.held and self.current_passes >= self.passes_per_round

    def end(self, *, averaged: bool) -> None:
        """Record the end of a step; ``averaged`` if it averaged."""
        self.carried_passes = 0 if averaged else self._passes_with()
        self.forget()

    def forget(self) -> None:
        """Discard the passes since the last step."""
        self.current_passes = 0
        self._passes_of.clear()
