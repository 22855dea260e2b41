"""Gathering of one record from every rank of a transport."""

from __future__ import annotations

from typing import TypeVar

import torch

from asyncddp.serialization import pack, unpack
from asyncddp.tensors.allocation import make_tensor
from asyncddp.tensors.byte_views import from_bytes
from asyncddp.transport.base import Transport

T = TypeVar("T")


def gather_records(transport: Transport, mine: T, kind: type[T], timeout: float) -> list[T]:
    """Gather a record of a given type from every rank, in rank order; collective."""
    packed = pack(mine)
    data = from_bytes(packed, torch.uint8, (len(packed),))
    length = make_tensor([data.numel()], torch.int64)
    sizes: list[int] = transport.allgather(length, [1] * transport.size, timeout).tolist()
    whole = transport.allgather(data, sizes, timeout)
    return [
        unpack(part.numpy().tobytes(), kind, f"what rank {peer} says of itself")
        for peer, part in enumerate(torch.split(whole, sizes))
    ]
