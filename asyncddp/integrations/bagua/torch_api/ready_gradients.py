"""Backward passes in which each gradient is marked ready once, when it is whole."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from asyncddp.algorithms.backward_pass import BackwardPass
from asyncddp.errors import UsageError


class ReadyGradients(BackwardPass):
    """Backward pass in which each gradient is marked ready once, during the pass or at its end."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        super().__init__(on_end)
        self._marked: set[int] = set()

    def is_ready(self, index: int, name: str) -> bool:
        """Count a gradient of a parameter; return whether to mark it, which is done once.

        Raises:
            UsageError: It was marked, and has changed.
        """
        self.count(index)
        if index in self._marked:
            raise UsageError(
                f"parameter {name} got another gradient in a backward pass, after the one before "
                "had been marked ready, which it did not in passes before; use "
                "checkpoint(..., use_reentrant=False)"
            )
        ready = self.is_last(index)
        if ready:
            self._marked.add(index)
        return ready

    def not_marked(self) -> list[int]:
        """Return the parameters whose gradients are to be marked at the end of the pass."""
        return [index for index in self._counts if index not in self._marked]

    @override
    def _end(self) -> None:
        super()._end()
        self._marked.clear()

    @override
    def forget_failed(self) -> bool:
        failed = super().forget_failed()
        if failed:
            self._marked.clear()
        return failed
