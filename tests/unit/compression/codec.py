"""Encoding and decoding in one call."""

from __future__ import annotations

import torch


def encoded(q, chunks, *, seed=0, state=None):
    """The bytes of chunks, or of a flat tensor as one chunk."""
    chunks = chunks if chunks.dim() == 2 else chunks.view(1, -1)
    size = q.encoded_size(chunks.shape[1], chunks.dtype)
    rows = torch.empty(len(chunks), size, dtype=torch.uint8)
    q.encode(chunks, rows, seed=seed, state=state)
    return rows


def received(q, chunks, *, seed=0, state=None):
    """What the bytes of chunks, or of a flat tensor, decode to, in their shape."""
    result = torch.full_like(chunks, torch.nan)
    q.decode(
        encoded(q, chunks, seed=seed, state=state),
        result if result.dim() == 2 else result.view(1, -1),
    )
    return result


def normal(*shape, dtype=torch.float32, seed=0):
    """Normal random numbers of a seed."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype)
