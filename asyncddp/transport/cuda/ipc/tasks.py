"""Asynchronous transfer tasks of CUDA IPC: generators that yield the events they wait for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from typing import TypeAlias

import torch

from asyncddp.device.streams import DeviceEvent
from asyncddp.transport.base import Request
from asyncddp.transport.cuda.ipc.exporter import PendingPeerRead

TaskSteps: TypeAlias = Generator["DeviceEvent | Request | PendingPeerRead | None", None, None]
"""Yields events or requests to wait for; None where the next task in its order may start."""


class TransferTask:
    """Non-blocking task that transfers one tensor by CUDA IPC; it serves as the caller's request.

    Args:
        order_key: Tasks with equal keys start one after the other.
        drive: Advances all tasks of the transport.

    Attributes:
        next_may_start: Whether the next task with the same order key may start.
        over: Whether the task has ended.
    """

    def __init__(self, order_key: Hashable, drive: Callable[[], None]) -> None:
        self.order_key, self._drive = order_key, drive
        self._steps: TaskSteps | None = None
        self._wait: DeviceEvent | Request | PendingPeerRead | None = None
        self._problem: Exception | None = None
        self.next_may_start = self.over = False

    def set_steps(self, steps: TaskSteps) -> None:
        """Set the steps of the task."""
        self._steps = steps

    def move(self) -> None:
        """Advance as far as possible without waiting."""
        try:
            while not self.over and (self._wait is None or self._wait.done()):
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
    """Task that sends a tensor by CUDA IPC: the peer reads it, or a copy of it, in GPU memory.

    Attributes:
        copied: Whether the peer reads a copy, which is enqueued.
    """

    copied = False

    def reusable(self) -> bool:
        """Return whether the tensor may be written again."""
        return self.copied or self.done()


class ReceiveTask(TransferTask):
    """Task that receives a tensor from a peer by CUDA IPC.

    Attributes:
        announced: Whether the ready message has come.
        needed: Whether anybody will read it.
    """

    announced, needed = False, True

    def abandon(self) -> None:
        """Cancel the receive, or drop the data where it was announced already."""
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
        """Set the tensor, which can be read from now on.

        Args:
            tensor: The tensor.
            acknowledge: Tells the peer that reads are enqueued, where the memory is the peer's.
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

    def abandon(self) -> None:
        """Cancel the import, and release the tensor."""
        super().abandon()
        self.release()


class TaskScheduler:
    """Scheduler of transfer tasks: advances them, and starts those of one peer and tag in order."""

    def __init__(self) -> None:
        self._all: list[TransferTask] = []

    def add(self, task: TransferTask) -> None:
        """Add a task."""
        self._all.append(task)

    def move(self) -> None:
        """Advance all tasks that may run."""
        waiting: set[Hashable] = set()
        for task in self._all:
            if task.order_key not in waiting:
                task.move()
            if not task.next_may_start:
                waiting.add(task.order_key)
        self._all = [task for task in self._all if not task.over]

    def clear(self) -> None:
        """Drop all tasks."""
        self._all.clear()
