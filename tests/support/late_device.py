"""Streams of a device that does everything late, in any order that its streams and events allow.

One more thing is done whenever somebody asks an event. What NCCL is handed waits here for the
other ranks, as its kernels do, and streams that wait for each other in a circle are found. Streams
can share hardware queues, where what was queued first must have begun before the next one may.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyncddp.device.stream_interfaces import DeviceStreams, StreamRole

__all__ = ["Late", "LateDevice"]

SECONDS = 60.0


class Late:
    """Something queued.

    Args:
        what: In words.
        run: Does it.
    """

    rank, resident, key, place = None, False, None, 0

    def __init__(self, what, run=None):
        self.what, self._run, self.over = what, run, False

    def ready(self):
        """Whether it may be done, being the first of its stream."""
        return True

    def run(self):
        if self._run is not None:
            self._run()
        self.over = True

    def needs(self):
        """What else must have been reached, each with its place, before this can be done."""
        return []


class _Mark(Late):
    """An event, and its place in a stream."""

    def __init__(self, device):
        super().__init__("event")
        self._device = device

    def done(self):
        self._device.step()
        return self.over


class _Wait(Late):
    def __init__(self, event):
        super().__init__("wait for an event")
        self._event = event

    def ready(self):
        return self._event.over

    def needs(self):
        return [] if self._event.over else [self._event]


class _Deferred(TorchDispatchMode):
    """What torch is asked to do in place is queued."""

    def __init__(self, queue):
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.empty.memory_format:
            return func(*args, **(kwargs or {}))
        assert func._schema.name.endswith("_"), f"{func} would make a tensor on a late stream"
        self._queue.append(Late(str(func), partial(func, *args, **(kwargs or {}))))
        return args[0]


class LateDevice(DeviceStreams):
    """The streams of a stand-in for a device, for all ranks of a test.

    Args:
        seed: Of the order in which things are done.
        room: Kernels that wait for other ranks and fit on one rank's device at a time.
        hardware_queues: Of a rank's device, shared by its streams in turn; by default one for each.
    """

    kind = "stand-in"
    device = torch.device("cpu")

    def __init__(self, seed=0, room=64, hardware_queues=None):
        self.lock = threading.RLock()
        self.queues = {}
        self.held = {}
        self.problem = None
        self.room = room
        self._random, self._here, self._idle = random.Random(seed), threading.local(), 0
        self._places = itertools.count()
        self._hardware_queues, self._shared, self._owners = hardware_queues, {}, {}

    def be_rank(self, rank):
        """Give this thread streams of a rank's own, where ranks are threads."""
        self._here.rank = rank

    def key(self, queue):
        """The stream that a queue is for this thread."""
        start, _, number = threading.current_thread().name.rpartition("-")
        of_thread = int(number) if start == "asyncddp-progress" else None
        rank = getattr(self._here, "rank", of_thread)
        own = queue if rank is None else (queue, rank)
        return (self._inside or own) if queue is StreamRole.CALLER else own

    _inside = property(lambda self: getattr(self._here, "key", None), doc="The current stream.")

    def stream(self, number, rank=0):
        """A stream of a rank's own: what makes it the current one."""
        self._owners[number] = rank

        @contextmanager
        def current():
            with self._being(number), _Deferred(self._of(number)):
                yield

        return current

    @contextmanager
    def _being(self, key):
        before, self._here.key = self._inside, key
        try:
            yield
        finally:
            self._here.key = before

    def _of(self, key):
        with self.lock:
            of_rank = not isinstance(key, StreamRole)  # else of a thread that opens communicators
            if of_rank and key not in self.queues and self._hardware_queues is not None:
                rank = self._owners[key] if isinstance(key, int) else key[1]
                streams = sum(owner == rank for owner, _ in self._shared.values())
                self._shared[key] = rank, streams % self._hardware_queues
            return self.queues.setdefault(key, deque())

    def append(self, key, late):
        with self.lock:
            late.key, late.place = key, next(self._places)
            self._of(key).append(late)
            self._skip(key)

    def claim(self, key):
        """The tensors that were said to be used on a stream, since the last time."""
        with self.lock:
            return self.held.pop(key, [])

    # the interface

    def record_event(self, queue):
        event = _Mark(self)
        self.append(self.key(queue), event)
        return event

    def wait_event(self, queue, event):
        self.append(self.key(queue), _Wait(event))
        if queue is StreamRole.CALLER and self._inside is None:
            self._reach(self.key(queue))

    @contextmanager
    def stream_context(self, queue):
        self._reach(self.key(queue))
        with self._being(self.key(queue)):
            yield

    def _reach(self, key):
        """Do what is queued on a stream, since what torch does there at once comes after it."""
        deadline, reached = time.monotonic() + SECONDS, _Mark(self)
        self.append(key, reached)
        while not reached.done():
            assert time.monotonic() < deadline, f"{key} waits for {self.queues[key][0].what}"
            time.sleep(0)

    def copy(self, out, source, queue):
        self.append(self.key(queue), Late("copy", lambda: out.copy_(source)))

    def record_stream(self, tensor, queue):
        with self.lock:
            self.held.setdefault(self.key(queue), []).append(tensor)

    def stream_pointer(self, queue):
        return self.key(queue)

    def allocate_pinned(self, size):
        return torch.empty(size, dtype=torch.uint8)

    # the device

    def step(self):
        """Do one thing that may be done; find out whether nothing ever may."""
        with self.lock:
            if self.problem is not None:
                raise self.problem
            for key in self._random.sample(sorted(self.queues, key=str), len(self.queues)):
                waiting = self.queues[key]
                if waiting and self._may_be_done(waiting[0]):
                    self._idle = 0
                    try:
                        waiting.popleft().run()
                    except AssertionError as problem:
                        self.problem = problem
                        raise
                    self._skip(key)
                    return
            self._idle += 1
            if self._idle % 20 == 0:
                self._look_for_circles()

    def _may_be_done(self, late):
        return not self._before(late) and self._fits(late) and late.ready()

    def _before(self, late):
        """What came before in the hardware queue, of other streams, and has not begun."""
        if late.resident or late.key not in self._shared:
            return []
        return [
            other
            for key, shared in self._shared.items()
            if key != late.key and shared == self._shared[late.key]
            for other in self.queues[key]
            if other.place < late.place and not other.resident
        ]

    def _fits(self, late):
        """Let a kernel that waits for other ranks onto its rank's device, if there is room."""
        if late.rank is not None and not late.resident:
            late.resident = len(self._resident(late.rank)) < self.room
        return late.rank is None or late.resident

    def _resident(self, rank):
        heads = [waiting[0] for waiting in self.queues.values() if waiting]
        return [late for late in heads if late.rank == rank and late.resident]

    def _skip(self, key):
        waiting = self.queues[key]
        while waiting and isinstance(waiting[0], _Mark | _Wait) and self._may_be_done(waiting[0]):
            waiting.popleft().run()

    def _look_for_circles(self):
        """Whatever can still end, supposing that hosts do all they may, is taken away."""
        queues = {key: list(waiting) for key, waiting in self.queues.items() if waiting}
        where = {
            late: (key, k) for key, waiting in queues.items() for k, late in enumerate(waiting)
        }
        free = dict.fromkeys(queues, 0)  # so many of each stream can end
        moved = True
        while moved:
            moved = False
            for key, waiting in queues.items():
                while free[key] < len(waiting) and self._can_end(
                    waiting[free[key]], where, free, queues
                ):
                    free[key] += 1
                    moved = True
        stuck = [waiting[free[key]] for key, waiting in queues.items() if free[key] < len(waiting)]
        if stuck:
            text = "ranks wait in a circle:"
            for late in stuck:
                others = ", ".join(other.what for other in late.needs()) or "room"
                text += f"\n{late.what} waits for {others}"
            self.problem = AssertionError(text)
            raise self.problem

    def _can_end(self, late, where, free, queues):
        for other in (late, *late.needs()):
            key, place = where.get(other, (None, 0))
            if key is None:
                continue
            if place > free[key] or any(
                free[where[one][0]] <= where[one][1] for one in self._before(other)
            ):
                return False
            if other.rank is not None and not other.resident:
                there = self._resident(other.rank)
                if len(there) >= self.room and not any(
                    free[where[one][0]] > where[one][1] for one in there
                ):
                    return False
        return True
