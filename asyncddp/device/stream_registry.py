"""Registry of this process's device streams: looks up, or creates, those of a tensor's device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncddp.device.cuda_streams import CudaStreams
from asyncddp.device.streams import DeviceStreams, StreamOrdering


class _StreamRegistry:
    """Registry of this process's streams by device, and of the streams of a simulated device."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, DeviceStreams] = {}
        self.simulated: DeviceStreams | None = None


_registry = _StreamRegistry()


def streams_of(tensor: torch.Tensor) -> DeviceStreams | None:
    """Return the streams of a tensor's device; None for the CPU and devices without streams.

    Example:
        >>> streams_of(torch.zeros(1)) is None
        True
    """
    if tensor.is_cpu:
        return _registry.simulated
    return streams_of_device(tensor.device) if tensor.is_cuda else None


def streams_of_device(device: torch.device) -> DeviceStreams:
    """Return the streams of a CUDA device, created on first use."""
    found = _registry.by_device.get(device)
    if found is None:
        found = _registry.by_device.setdefault(device, CudaStreams(device))
    return found


def stream_ordering_of(tensor: torch.Tensor, *others: torch.Tensor | None) -> StreamOrdering | None:
    """Make an operation's stream ordering after the caller's stream; None on the host.

    Args:
        tensor: Tensor that the operation reads.
        *others: Other tensors that it reads or writes.
    """
    streams = streams_of(tensor)
    if streams is None:
        return None
    kept = [other for other in others if other is not None and other.device == tensor.device]
    return StreamOrdering(streams, (tensor, *kept))


@contextmanager
def simulate_device(streams: DeviceStreams) -> Iterator[None]:
    """Treat CPU tensors as tensors on a simulated device, in all threads, while entered.

    For tests: all code for GPUs then runs in full, on CPU tensors.
    """
    before, _registry.simulated = _registry.simulated, streams
    try:
        yield
    finally:
        _registry.simulated = before
