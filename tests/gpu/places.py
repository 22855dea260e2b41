"""Where cases of GPUs run: on one, or on one that is pretended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext

import torch

import asyncddp as bf
from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.device.stream_registry import streams_of_device
from tests.gpu import pretended

__all__ = ["GPU", "Place", "PretendedGPU", "on_a_pretended_gpu"]

_LONG = 4_000_000  # cycles, some 2 ms


class Place(ABC):
    """A device, and how a test makes it late. Each rank asks its own."""

    @property
    @abstractmethod
    def device(self):
        """This rank's device."""

    @abstractmethod
    def there(self):
        """While entered, what this thread makes lies on the device, unless it says otherwise."""

    @abstractmethod
    def side(self):
        """While entered, this thread queues its work on a stream of its own."""

    @abstractmethod
    def late(self, out, source):
        """Write the values of a tensor on the host after a while, on the current stream."""

    @abstractmethod
    def busy(self):
        """Keep the current stream busy for a while."""

    @abstractmethod
    def graph(self, compute):
        """What does ``compute()`` again, captured as one graph where there are such."""

    @abstractmethod
    def captured(self, compute, meanwhile):
        """Like :meth:`graph`, in the default mode, while ``meanwhile()`` runs on the host."""

    @abstractmethod
    def ends(self):
        """Wait for all that was queued."""


class GPU(Place):
    """The GPU that the library takes for a rank, also where machines are pretended."""

    @property
    def device(self):
        return torch.device("cuda", bf.current().default_gpu)

    @contextmanager
    def there(self):
        with torch.cuda.device(self.device), torch.device(self.device):
            yield

    def side(self):
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    def late(self, out, source):
        source = source.pin_memory()
        self.busy()
        out.copy_(source, non_blocking=True)

    def busy(self):
        torch.cuda._sleep(_LONG)

    def graph(self, compute):
        """Warmed up as CUDA's graphs ask for; the ranks capture in turn, as threads must."""
        with self.side():
            compute()
        self.ends()
        captured = torch.cuda.CUDAGraph()
        for turn in range(bf.size()):
            bf.barrier()
            if turn == bf.rank():
                with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                    compute()
        bf.barrier()
        return captured.replay

    def captured(self, compute, meanwhile):
        """For ranks that are processes: the mode forbids unsafe calls to all other threads."""
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            compute()
            meanwhile()
        return captured.replay

    def ends(self):
        torch.cuda.synchronize(self.device)


class PretendedGPU(Place):
    """The GPU of :mod:`tests.gpu.pretended`, which must be there."""

    @property
    def device(self):
        return pretended.DEVICE

    @property
    def _streams(self):
        return streams_of_device(self.device)

    @contextmanager
    def there(self):
        with self._streams.stream_context(StreamRole.CALLER), torch.device(self.device):
            yield

    def side(self):
        return nullcontext()

    def late(self, out, source):
        self._streams.copy(out, source, StreamRole.CALLER)

    def busy(self):
        """Copies of the pretended GPU are late by themselves."""

    def graph(self, compute):
        return compute

    def captured(self, compute, meanwhile):
        compute()
        meanwhile()
        return compute

    def ends(self):
        """Let the caller's queue end; others have nothing that a caller was not handed."""
        self._streams.wait_event(StreamRole.CALLER, self._streams.record_event(StreamRole.CALLER))


def on_a_pretended_gpu(case, *args):
    """A case on a rank that is a process, which has no GPU."""
    with pretended.pretended_gpu():
        return case(PretendedGPU(), *args)
