"""A stand-in for the streams of a device whose queues wait for each other, as those of a GPU do."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

from torch.utils._python_dispatch import TorchDispatchMode

from asyncddp.device.stream_interfaces import StreamRole
from tests.support.simulated_streams import SimulatedStreams

__all__ = ["LazyStreams"]


class LazyStreams(SimulatedStreams):
    """Queues that wait for events in their turn, and work that waits in its queue.

    The plain stand-in does at once what an event is behind, and what torch is asked to do. Here
    both wait until somebody has asked an event often enough, or reads on the caller's queue.
    """

    def wait_event(self, queue, event):
        self.later(queue, lambda: None, lambda: event.reached, quick=True)

    @contextmanager
    def stream_context(self, queue):
        with _Queued(self, queue):
            yield

    def advance(self, queue):
        """A question to one queue lets all of them move on."""
        self._note_use()
        with self._lock:
            self.questions += 1
            self._asked[queue] += 1
            self._settle()
            if self._asked[queue] > self._laziness:
                self._asked[queue] = 0
                for one in StreamRole:
                    self._step(one)
                self._settle()

    def _settle(self):
        """Reach all events that are next."""
        before = -1
        while before != (now := sum(map(len, self._queues.values()))):
            before = now
            for one in StreamRole:
                self._skip(one)

    def read(self, tensor):
        """What the caller's next work finds in a tensor."""
        self.drain(StreamRole.CALLER)
        return tensor.clone()

    def drain(self, queue):
        """Do all that is in a queue."""
        self.reach(queue, lambda: not self._queues[queue])


class _Queued(TorchDispatchMode):
    """Work that writes into a tensor is queued; what makes a new one needs its inputs now."""

    ROOM = ("empty", "new_empty", "empty_like", "detach", "view", "alias")

    def __init__(self, streams, queue):
        super().__init__()
        self._streams, self._queue = streams, queue

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._streams.later(self._queue, partial(func, *args, **kwargs))
            return kwargs.get("out", args[0])
        if func._schema.name.removeprefix("aten::") not in self.ROOM:
            self._streams.drain(self._queue)
        return func(*args, **kwargs)
