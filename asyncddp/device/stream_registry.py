"""Registry of device streams: one ``DeviceStreams`` per device of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncddp.device.cuda_streams import CudaStreams
from asyncddp.device.stream_interfaces import DeviceStreams, StreamOrdering

_by_device: dict[torch.device, DeviceStreams] = {}
_on_cpu: list[DeviceStreams] = []  # by :func:`use_streams_on_cpu`; the last one counts


def streams_of(tensor: torch.Tensor) -> DeviceStreams | None:
    """Return the streams of a tensor's device; None for the CPU and devices without streams.

    Example:
        >>> streams_of(torch.zeros(1)) is None
        True
    """
    if tensor.is_cpu:
        return _on_cpu[-1] if _on_cpu else None
    return streams_of_device(tensor.device) if tensor.is_cuda else None


def streams_of_device(device: torch.device) -> DeviceStreams:
    """Return the streams of a CUDA device, created on first use."""
    found = _by_device.get(device)
    return found or _by_device.setdefault(device, CudaStreams(device))


def stream_ordering_of(tensor: torch.Tensor, *others: torch.Tensor | None) -> StreamOrdering | None:
    """Make the stream ordering of an operation on some tensors; None for CPU tensors."""
    streams = streams_of(tensor)
    if streams is None:
        return None
    kept = [other for other in others if other is not None and other.device == tensor.device]
    return StreamOrdering(streams, (tensor, *kept))


@contextmanager
def use_streams_on_cpu(streams: DeviceStreams) -> Iterator[None]:
    """Treat CPU tensors as tensors of a device with these streams, in all threads (for tests).

    All code for GPUs then runs in full, on CPU tensors.
    """
    _on_cpu.append(streams)
    try:
        yield
    finally:
        _on_cpu.pop()
