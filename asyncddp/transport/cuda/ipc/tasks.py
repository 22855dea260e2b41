"""Asynchronous transfer tasks of CUDA IPC: generators that yield the events they wait for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from typing import TypeAlias

import torch
from typing_extensions import override

from asyncddp.device.streams import DeviceEvent

TaskSteps: TypeAlias = Generator[DeviceEvent | None, None, None]
"""Yields events or requests to wait for; None where the next task in its order may start."""


class TransferTask:
    """Non-blocking task that transfers one tensor by CUDA IPC; it serves as the caller's request.

    Tasks with equal order keys start one after the other; ``drive`` advances all of the transport.
    """

    steps: TaskSteps

    def __init__(self, order_key: Hashable, drive: Callable[[], None]) -> None:
        self.order_key, self._drive = order_key, drive
        self._wait: DeviceEvent | None = None
        self._problem: Exception | None = None
        self.next_may_start = self.over = False
        self.moves = 0  # how often it went on

    def advance(self, *, first: bool) -> None:
        """Advance as far as possible without waiting, where it is the first with its key."""
        try:
            while first and not self.over and (self._wait is None or self._wait.done()):
                self._wait = next(self.steps)
                self.moves += 1
                self.next_may_start = self.next_may_start or self._wait is None
        except StopIteration:
            self._end()
        except (
            RuntimeError,
            OSError,
            MemoryError,
        ) as problem:  # a peer's, or one of the device's libraries
            self._problem = problem
            self._end()

    def _end(self) -> None:
        self.next_may_start = self.over = True
        self.steps.close()
        self._wait = None

    def done(self) -> bool:
        """Return whether the tensor was received, or read by the peer."""
        self._drive()
        if self._problem is not None:
            raise self._problem
        return self.over

    def abandon(self) -> None:
        """Do nothing: the peer will still read the tensor, so the task goes on."""


class SendTask(TransferTask):
    """Task that sends a tensor by CUDA IPC: the peer reads it, or a copy of it, in GPU memory."""

    copied = False  # True if the peer reads a copy, which is enqueued

    def reusable(self) -> bool:
        """Return whether the tensor may be written again."""
        return self.copied or self.done()


class ReceiveTask(TransferTask):
    """Task that receives a tensor from a peer by CUDA IPC."""

    announced = False  # True once the ready message has come
    needed = True  # False once the task was abandoned or released

    @override
    def abandon(self) -> None:  # the data is dropped where it was announced already
        self.needed = False
        if self.announced or self.over:
            return
        waits_for = getattr(self._wait, "abandon", None)  # events have no such method
        if waits_for is not None:
            waits_for()
        self._end()


class ImportTask(ReceiveTask):
    """Task that maps a peer's GPU tensor to read it in place, or copies it if sent in pieces."""

    def __init__(self, order_key: Hashable, drive: Callable[[], None]) -> None:
        super().__init__(order_key, drive)
        self._tensor: torch.Tensor | None = None
        self._acknowledge: Callable[[], None] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, once done."""
        if self._tensor is None:
            raise RuntimeError("expected an imported tensor that is done and not yet released")
        return self._tensor

    def set_tensor(
        self, tensor: torch.Tensor, acknowledge: Callable[[], None] | None = None
    ) -> None:
        """Set the tensor to read; ``acknowledge`` tells its owner once the reads are queued."""
        self._tensor, self._acknowledge = tensor, acknowledge
        if not self.needed:
            self.release()

    def release(self) -> None:
        """Release the tensor: its reads are enqueued, or there will be none."""
        self.needed = False
        acknowledge, self._acknowledge, self._tensor = self._acknowledge, None, None
        if acknowledge is not None:
            acknowledge()

    @override
    def abandon(self) -> None:
        super().abandon()
        self.release()
