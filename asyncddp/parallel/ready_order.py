"""Order in which parameters' gradients become ready in a backward pass."""

from __future__ import annotations

from collections.abc import Sequence


class GradientReadyOrder:
    """Record of the order in which parameters got gradients in a backward pass, with counts.

    A parameter that gets several, as under re-entrant activation checkpointing, is ready with its
    last.

    Example:
        >>> ready_order = GradientReadyOrder()
        >>> for parameter in (2, 0, 2):
        ...     ready_order.record(parameter)
        >>> ready_order.order, ready_order.gradient_count(2), ready_order.unused(4)
        ([0, 2], 2, [1, 3])
        >>> ready_order.describe(["a", "b", "c", "d"])[:2]
        ['the 1st gradient of all for a', 'the 2nd gradient of all for c, which got 2']
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def record(self, parameter: int) -> None:
        """Record a gradient of a parameter."""
        self._counts[parameter] = self._counts.pop(parameter, 0) + 1

    def clear(self) -> None:
        """Clear the record."""
        self._counts.clear()

    @property
    def order(self) -> list[int]:
        """Parameters that got gradients, in the order of their last ones."""
        return list(self._counts)

    def gradient_count(self, parameter: int) -> int:
        """Return how many gradients a parameter got."""
        return self._counts.get(parameter, 0)

    def unused(self, count: int) -> list[int]:
        """Return those of ``count`` parameters that got no gradient."""
        return [parameter for parameter in range(count) if parameter not in self._counts]

    def describe(self, names: Sequence[str]) -> list[str]:
        """Describe the order as sentences, which must be equal on all ranks."""
        found = []
        for position, parameter in enumerate(self._counts, start=1):
            times = self._counts[parameter]
            more = f", which got {times}" if times > 1 else ""
            found.append(f"the {_ordinal(position)} gradient of all for {names[parameter]}{more}")
        return found + [f"no gradient for {names[index]}" for index in self.unused(len(names))]


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'}"
