"""Streams of the host, whose work is done as soon as it is enqueued."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from typing_extensions import override

from asyncddp.device.streams import DeviceEvent, DeviceStreams, StreamRole
from asyncddp.tensors.allocation import empty


class _ReachedEvent:
    def done(self) -> bool:
        return True


class HostStreams(DeviceStreams):
    """Streams of host memory: a receive on them keeps bytes that a peer's device sends on the host.

    Example:
        >>> streams, out = HostStreams(), torch.zeros(1)
        >>> streams.copy(out, torch.ones(1), StreamRole.DEVICE_TO_HOST)
        >>> float(out), streams.record_event(StreamRole.DEVICE_TO_HOST).done()
        (1.0, True)
    """

    kind = "cpu"
    device = torch.device("cpu")

    @override
    def record_event(self, role: StreamRole) -> DeviceEvent:
        return _ReachedEvent()

    @override
    def wait_event(self, role: StreamRole, event: DeviceEvent) -> None:
        pass

    @override
    def stream_context(self, role: StreamRole) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def copy(self, out: torch.Tensor, source: torch.Tensor, role: StreamRole) -> None:
        out.copy_(source)

    @override
    def record_stream(self, tensor: torch.Tensor, role: StreamRole) -> None:
        pass

    @override
    def stream_pointer(self, role: StreamRole) -> int:
        return 0

    @override
    def allocate_pinned(self, size: int) -> torch.Tensor:
        return empty((size,), torch.uint8)
