"""Device that ``gpu`` measures: a rank's GPU, or the host in its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import asyncddp as bf
from asyncddp.device.stream_interfaces import DeviceStreams, HostStreams, StreamRole
from asyncddp.device.stream_registry import streams_of_device, use_streams_on_cpu
from asyncddp.transport.cuda.staged_transport import device_transport_for


def gpus() -> int:
    """Count the GPUs that torch sees here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class Device(ABC):
    """Device that holds a rank's tensors.

    Attributes:
        place: As torch names it.
        streams: Its queues.
        memory: Its bytes.
    """

    place: torch.device
    streams: DeviceStreams
    memory: int

    @abstractmethod
    def wait(self) -> None:
        """Let all that this thread has queued end."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Describe the device for the report's header."""

    def transport(self) -> str:
        """The transport that the ranks have agreed on."""
        return device_transport_for(bf.current().transport, self.streams).name

    def held(self, nbytes: int, rank: int) -> torch.Tensor:
        """Create rank r's input: float32, small whole numbers times r + 1."""
        numbers = torch.arange(nbytes // 4, device=self.place).remainder_(1021)
        return numbers.to(torch.float32).mul_(rank + 1)

    def host(self, nbytes: int) -> torch.Tensor:
        """Pinned memory of the host, as floats."""
        return self.streams.allocate_pinned(nbytes).view(torch.float32)


class _GPU(Device):
    def __init__(self) -> None:
        self.place = torch.device("cuda", bf.current().default_gpu or 0)
        torch.cuda.set_device(self.place)
        self.streams = streams_of_device(self.place)
        self.memory = int(torch.cuda.get_device_properties(self.place).total_memory)

    def wait(self) -> None:
        torch.cuda.current_stream(self.place).synchronize()

    def facts(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name(self.place)
        return {
            "gpu": f"{gpus()} x {name}, {self.memory / 2**30:.0f} GB",
            "cuda": torch.version.cuda,
        }


class _HostDevice(Device):
    def __init__(self, streams: HostStreams) -> None:
        self.place, self.streams, self.memory = streams.device, streams, 1 << 30

    def wait(self) -> None:
        self.streams.wait_event(StreamRole.CALLER, self.streams.record_event(StreamRole.CALLER))

    def facts(self) -> dict[str, Any]:
        return {"gpu": "none: host memory stands in for it, and the figures mean nothing"}


@contextmanager
def open_device(*, pretend: bool) -> Iterator[Device]:
    """Enter the world; this rank's device, or with ``pretend`` what stands in for one."""
    streams = HostStreams()
    with use_streams_on_cpu(streams) if pretend else nullcontext():
        bf.init()  # which tells the rank its GPU
        yield _HostDevice(streams) if pretend else _GPU()
        bf.shutdown()
