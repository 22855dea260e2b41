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

    def __init__(self, order_key: Hashable, drive: Callable[[], None]) -> None:
        self.order_key, self._drive = order_key, drive
        self._steps: TaskSteps | None = None
        self._wait: DeviceEvent | None = None
        self._problem: Exception | None = None
        self.next_may_start = self.over = False

    def set_steps(self, steps: TaskSteps) -> None:
        """Set the steps of the task."""
        self._steps = steps

    def advance(self, *, first: bool) -> None:
        """Advance as far as possible without waiting, where it is the first with its key."""
        try:
            while first and not self.over and (self._wait is None or self._wait.done()):
                self._step()
        except (RuntimeError, OSError) as problem:  # a peer's, or one of the device's libraries
            self._problem = problem
            self._end()

    def _step(self) -> None:
        if self._steps is None:
            return
        try:
            self._wait = next(self._steps)
        except StopIteration:
            self._end()
        else:
            self.next_may_start = self.next_may_start or self._wait is None

    def _end(self) -> None:
        self.next_may_start = self.over = True
        if self._steps is not None:
            self._steps.close()
        self._steps = self._wait = None

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

    copied = False
    """Whether the peer reads a copy, which is enqueued."""

    def reusable(self) -> bool:
        """Return whether the tensor may be written again."""
        return self.copied or self.done()


class ReceiveTask(TransferTask):
    """Task that receives a tensor from a peer by CUDA IPC.

    It knows whether the ready message has come, and whether anybody needs the tensor.
    """

    announced, needed = False, True

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
            raise RuntimeError("expected a loan that is done and was not released yet")
        return self._tensor

    def set_tensor(
        self, tensor: torch.Tensor, acknowledge: Callable[[], None] | None = None
    ) -> None:
        """Set the tensor, which can be read from now on; ``acknowledge`` tells a peer that owns it.

        It is called once reads are enqueued.
        """
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
