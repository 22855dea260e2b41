"""The average model, shown for a while in place of this rank's own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.ops.average_tensors import average_tensors

__all__ = ["Lending"]


class Lending:
    """Averages of a model's tensors over all ranks, for good or for a while.

    Args:
        context: The world.
        model: The model, all of whose parameters of floats count.
        buffers: Whether its buffers of floats do.
    """

    def __init__(self, context: Context, model: torch.nn.Module, *, buffers: bool) -> None:
        self._context, self._model, self._buffers = context, model, buffers
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def lent(self) -> bool:
        """Whether the average model is shown."""
        return self._kept is not None

    def average(self) -> None:
        """Replace all by the averages; collective."""
        with use(self._context), torch.no_grad():
            average_tensors(list(self._tensors()))

    def lend(self) -> None:
        """Keep this rank's own, and show the averages; collective."""
        self._kept = [(tensor, tensor.data.clone()) for tensor in self._tensors()]
        self.average()

    def give_back(self) -> None:
        """Show this rank's own again, bit by bit."""
        for tensor, own in self._kept or ():
            tensor.data.copy_(own)
        self.forget()

    def forget(self) -> None:
        """What is shown is this rank's own from now on."""
        self._kept = None

    def _tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self._model.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                yield parameter
        for buffer in self._model.buffers() if self._buffers else ():
            if buffer.is_floating_point() or buffer.is_complex():
                yield buffer
