"""Staging of a window: host buffers that neighbours read, and copies to and from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from typing_extensions import override

from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.kernels.cpu_weighted_sum import WeightedTensor, weighted_sum
from asyncddp.shm.arena import Arena, SharedMemoryHandle, full_memory_fence
from asyncddp.tensors.allocation import empty, empty_like
from asyncddp.tensors.byte_views import dense
from asyncddp.windows.edge import EdgeWriter, RefCountedBuffer

_NOWHERE = SharedMemoryHandle(0, 0, 0)  # of tensors without elements

UndeliveredMessage: TypeAlias = tuple[int, Callable[[], bool]]
"""Neighbour to which a message was sent, and a function that returns if it was answered."""

SentMessages: TypeAlias = Sequence[UndeliveredMessage]
PublishCallback: TypeAlias = Callable[[RefCountedBuffer], SentMessages]
"""Publishes a buffer along edges, under the window's lock; returns the sent messages."""


def scalar_for(tensor: torch.Tensor, weight: float) -> float:
    """Convert a weight to a scalar that can multiply a tensor in place: an int for integers."""
    return weight if tensor.is_floating_point() else int(weight)


class BufferPool:
    """Pool of the buffers that a window publishes; a buffer is reused once nobody reads it.

    Buffers are in shared memory, or in private memory without an arena.
    """

    def __init__(self, arena: Arena | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._arena, self._shape, self._dtype = arena, shape, dtype
        self.edges: list[EdgeWriter] = []
        self.buffers: list[RefCountedBuffer] = []

    def acquire_buffer(self) -> RefCountedBuffer:
        """Return a buffer that nobody reads, allocated if necessary, with one reference."""
        full_memory_fence()  # between the newest versions and what readers say that they hold
        busy: list[RefCountedBuffer] = []
        for edge in self.edges:
            busy += edge.in_use()
        with RefCountedBuffer.counting:
            for buffer in self.buffers:
                if not buffer.holds and buffer not in busy:
                    buffer.holds = 1
                    return buffer
        buffer = self._new()
        buffer.holds = 1
        self.buffers.append(buffer)
        return buffer

    def close(self) -> None:
        """Release all buffers; peers must have stopped reading them."""
        self._arena = None
        self.edges, self.buffers = [], []

    def _new(self) -> RefCountedBuffer:
        if self._arena is None:
            return RefCountedBuffer(empty(self._shape, self._dtype), None)
        tensor = self._arena.empty(self._shape, self._dtype)
        place = self._arena.locate(tensor) if tensor.numel() else _NOWHERE
        if place is None:
            raise OSError("no more memory can be shared with the ranks of this machine")
        return RefCountedBuffer(tensor, place)


class PendingPublish:
    """Pending publication of a tensor in a window, which may wait for a copy from the GPU.

    ``messages`` are the sent messages, None before publication; ``problem`` is the error if
    publication failed.
    """

    __slots__ = ("messages", "problem")

    def __init__(self, messages: SentMessages | None = None) -> None:
        self.messages = messages
        self.problem: Exception | None = None


class SynchronousTensorStaging:
    """Staging by synchronous copies, for a window whose tensor is on the host."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def publish(
        self, tensor: torch.Tensor, factor: float, publish_buffer: PublishCallback
    ) -> PendingPublish:
        """Publish a copy of a tensor, then multiply the tensor by a factor."""
        values = tensor.detach() if tensor.requires_grad else tensor
        messages = self._publish_copy(values, publish_buffer)
        if factor != 1.0:
            values.mul_(scalar_for(values, factor))
        return PendingPublish(messages)

    def _publish_copy(self, values: torch.Tensor, publish_buffer: PublishCallback) -> SentMessages:
        buffer = self._pool.acquire_buffer()
        try:
            buffer.tensor.copy_(values)
            return publish_buffer(buffer)
        finally:
            buffer.drop()

    def run_after(self, act: Callable[[], SentMessages]) -> PendingPublish:
        """Run an action after all earlier publications."""
        return PendingPublish(act())

    def average_into(
        self,
        own: torch.Tensor,
        weight: float,
        terms: Sequence[WeightedTensor],
        shares: int,
        *,
        clone: bool,
    ) -> torch.Tensor:
        r"""Compute :math:`w_0 x + \sum_k w_k b_k` in x, or with ``clone`` in a new tensor.

        ``terms`` are tensors on the host, not used afterwards. ``shares`` is the number of tensors
        in the average, as for :func:`~asyncddp.kernels.cpu_weighted_sum.weighted_sum`.
        """
        values = own.detach() if own.requires_grad else own
        direct = own.is_cpu and own.is_contiguous()
        here = values if direct else values.to("cpu").contiguous()
        out = empty_like(here) if clone or not direct else here
        weighted_sum(out, [(here, weight), *terms], shares=shares)
        if clone:
            return out.to(own.device)
        if not direct:
            values.copy_(out)
        return own

    def new_sum(self, own: torch.Tensor, terms: Sequence[WeightedTensor]) -> torch.Tensor:
        """Return a weighted sum of host tensors, as a new tensor on the own tensor's device."""
        out = empty(own.shape, own.dtype)
        weighted_sum(out, terms)
        return out.to(own.device)

    def throttle(self) -> None:
        """Wait, without the window's lock, until few enough copies are in flight.

        Raises the error of an earlier publication that failed.
        """

    def close(self) -> None:
        """Stop publishing."""


class CompressedStaging(SynchronousTensorStaging):
    """Staging that compresses a window's tensor as it is copied into buffers for neighbours."""

    def __init__(self, pool: BufferPool, codec: TensorCompressor) -> None:
        super().__init__(pool)
        self._codec = codec

    @override
    def _publish_copy(self, values: torch.Tensor, publish_buffer: PublishCallback) -> SentMessages:
        buffer = self._pool.acquire_buffer()
        try:
            self._codec.encode(dense(values).view(1, -1), buffer.tensor)
            return publish_buffer(buffer)
        finally:
            buffer.drop()


class StoredForm:
    """Format of a window's published tensors: uncompressed, or compressed by a codec.

    Attributes:
        codec: The compressor; None if uncompressed.
        shape, dtype: Of the published tensors, which are bytes if compressed.
    """

    def __init__(self, tensor: torch.Tensor, codec: TensorCompressor | None) -> None:
        self.codec, self._values = codec, (tuple(tensor.shape), tensor.dtype)
        self.shape, self.dtype = self._values
        if codec is not None:
            size = codec.compressor.encoded_size(tensor.numel(), tensor.dtype)
            self.shape, self.dtype = (1, size), torch.uint8

    def read(self, published: torch.Tensor) -> torch.Tensor:
        """Return the values of a published tensor, decoded into new memory if compressed."""
        if self.codec is None:
            return published
        shape, dtype = self._values
        decoded = empty(shape, dtype)
        self.codec.decode(published, decoded.view(1, -1))
        return decoded
