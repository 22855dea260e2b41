"""The average model, shown for a while in place of this rank's own."""

from __future__ import annotations

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.memory.allocate import copied
from asyncddp.ops.average_tensors import average_module, dense_floats

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
            average_module(self._model, buffers=self._buffers)

    def lend(self) -> None:
        """Keep this rank's own, and show the averages; collective."""
        tensors = dense_floats(self._model, buffers=self._buffers)
        self._kept = [(tensor, copied(tensor)) for tensor in tensors]
        self.average()

    def give_back(self) -> None:
        """Show this rank's own again, bit by bit."""
        for tensor, own in self._kept or ():
            tensor.data.copy_(own)
        self.forget()

    def forget(self) -> None:
        """What is shown is this rank's own from now on."""
        self._kept = None
