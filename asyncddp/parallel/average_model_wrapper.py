"""Averaging of a model over all ranks, permanently or until this rank's own is restored."""

from __future__ import annotations

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.ops.average_tensors import average_module, dense_floats
from asyncddp.tensors.allocation import TensorBackup


class AveragedParameters:
    """Parameters of a model averaged over all ranks, with a backup of this rank's own."""

    def __init__(self, context: Context, model: torch.nn.Module, *, buffers: bool) -> None:
        self._context, self._model, self._buffers = context, model, buffers
        self._backup: TensorBackup | None = None

    @property
    def applied(self) -> bool:
        """True while the model holds the averages and a backup exists."""
        return self._backup is not None

    def average(self) -> None:
        """Replace parameters by their averages; collective."""
        with use(self._context), torch.no_grad():
            average_module(self._model, buffers=self._buffers)

    def apply(self) -> None:
        """Back up this rank's own parameters, and replace them by the averages; collective."""
        self._backup = TensorBackup(dense_floats(self._model, buffers=self._buffers))
        self.average()

    def restore(self) -> None:
        """Restore this rank's own parameters bit by bit, if there is a backup."""
        if self._backup is not None:
            self._backup.restore()
        self.discard_backup()

    def discard_backup(self) -> None:
        """Discard the backup, so that the present values are this rank's own."""
        self._backup = None
