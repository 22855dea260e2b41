"""The count of backward passes between two averagings. A table without I/O."""

from __future__ import annotations

__all__ = ["Passes"]


class Passes:
    """Decides when it is time to average: after ``every`` backward passes.

    One rule serves both uses of ``num_steps_per_communication=J``. The unit is the backward pass; a
    ``step()`` counts at least one, whatever it did. So J times backward and step average in the
    J-th step ("local SGD"), and J times backward with one step average in that step (accumulation).

    Args:
        every: J.

    Attributes:
        carried: Passes that earlier steps have made since the last averaging.
        now: Passes since the last step: how often the busiest parameter got a gradient.

    Example:
        >>> passes = Passes(every=2)
        >>> passes.record(0), passes.due(), passes.end(averaged=False)
        (1, False, None)
        >>> passes.record(0), passes.due()
        (1, True)
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.carried = 0
        self.now = 0
        self._fired: dict[int, int] = {}

    def record(self, parameter: int) -> int:
        """A parameter got its gradient; the number of times it did since the last step."""
        count = self._fired.get(parameter, 0) + 1
        self._fired[parameter] = count
        self.now = max(self.now, count)
        return count

    def due(self, more: int = 0) -> bool:
        """Whether a step that comes after so many more passes averages."""
        return self.carried + max(1, self.now + more) >= self.every

    def end(self, *, averaged: bool) -> None:
        """A step has ended."""
        self.carried = 0 if averaged else self.carried + max(1, self.now)
        self.now = 0
        self._fired.clear()
