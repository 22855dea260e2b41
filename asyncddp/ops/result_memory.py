"""Checks whether the result of an average may be written directly into a given tensor."""

from __future__ import annotations

import torch


def can_write_result(out: torch.Tensor | None, own: torch.Tensor) -> bool:
    """Return True if the average can be written directly into ``out``, chunk by chunk."""
    return (
        out is not None
        and out.device == own.device
        and out.dtype == own.dtype
        and out.shape == own.shape
        and out.is_contiguous()
        and (is_same_memory(out, own) or _storage(out) != _storage(own))
    )


def is_same_memory(out: torch.Tensor | None, own: torch.Tensor) -> bool:
    """Return True if ``out`` begins where the tensor does."""
    return out is not None and out.data_ptr() == own.data_ptr()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
