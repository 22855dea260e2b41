"""Backup of tensors, from which they are restored bit by bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from asyncddp.tensors.allocation import detached_copy


class TensorBackup:
    """Copies of tensors, made on construction, from which the tensors can be restored later.

    Args:
        tensors: The tensors.

    Example:
        >>> x = torch.ones(2)
        >>> backup = TensorBackup([x])
        >>> _ = x.zero_()
        >>> backup.restore()
        >>> x
        tensor([1., 1.])
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._copies = [(tensor, detached_copy(tensor)) for tensor in tensors]

    def restore(self) -> None:
        """Write the copies back through ``data``, which leaves autograd's records alone."""
        for tensor, own in self._copies:
            tensor.data.copy_(own)
