"""The order in which gradients get ready, seen in one backward pass."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Trace"]


class Trace:
    """Who got gradients in a backward pass, in which order, and how many times.

    A parameter that gets several, as under re-entrant activation checkpointing, is ready with its
    last.

    Example:
        >>> trace = Trace()
        >>> for parameter in (2, 0, 2):
        ...     trace.record(parameter)
        >>> trace.order, trace.times(2), trace.unused(4)
        ([0, 2], 2, [1, 3])
        >>> trace.facts(["a", "b", "c", "d"])[:2]
        ['the 1st gradient of all for a', 'the 2nd gradient of all for c, which got 2']
    """

    def __init__(self) -> None:
        self._times: dict[int, int] = {}

    def record(self, parameter: int) -> None:
        """A parameter got a gradient."""
        self._times[parameter] = self._times.pop(parameter, 0) + 1

    def clear(self) -> None:
        """Begin anew."""
        self._times.clear()

    @property
    def order(self) -> list[int]:
        """Those that got gradients, in the order of their last ones."""
        return list(self._times)

    def times(self, parameter: int) -> int:
        """How many gradients a parameter got."""
        return self._times.get(parameter, 0)

    def unused(self, count: int) -> list[int]:
        """Those of so many parameters that got none."""
        return [parameter for parameter in range(count) if parameter not in self._times]

    def facts(self, names: Sequence[str]) -> list[str]:
        """What must be equal on all ranks, in words.

        Args:
            names: Of all parameters.
        """
        found = []
        for place, parameter in enumerate(self._times, start=1):
            times = self._times[parameter]
            more = f", which got {times}" if times > 1 else ""
            found.append(f"the {_ordinal(place)} gradient of all for {names[parameter]}{more}")
        return found + [f"no gradient for {names[index]}" for index in self.unused(len(names))]


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'}"
