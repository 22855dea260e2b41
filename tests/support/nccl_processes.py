"""A stand-in for NCCL between two ranks that are processes: its calls go over MPI, as late."""

from __future__ import annotations

from asyncddp.transport.cuda.nccl.cupy_bindings import CupyBindings
from tests.support.late_device import Late
from tests.support.nccl import TYPES, memory

__all__ = ["ProcessNccl"]

SECONDS = 60.0


class _Sent(Late):
    """Messages or a collective, begun once they are first in their stream."""

    rank, resident = None, True

    def __init__(self, start, held):
        super().__init__("what goes over MPI")
        self._start, self._under_way, self.held = start, None, held

    def ready(self):
        if self._under_way is None:
            self._under_way = self._start()
        return all([transfer.done() for transfer in self._under_way])


class _Communicator:
    """cupy's, of two ranks."""

    def __init__(self, owner, tag):
        self._owner, self._tag, self.ended = owner, tag, None

    def _queue(self, kind, tensor, stream):
        assert self.ended is None
        self._owner.group.append((kind, tensor, self._tag))
        self._owner.stream = stream

    def _memory(self, pointer, count, datatype, stream):
        return memory(pointer, count, TYPES[datatype], self._owner.device.held.get(stream, []))

    def send(self, pointer, count, datatype, peer, stream):
        self._queue("send", self._memory(pointer, count, datatype, stream), stream)

    def recv(self, pointer, count, datatype, peer, stream):
        self._queue("recv", self._memory(pointer, count, datatype, stream), stream)

    def _collective(self, stream, start):
        device = self._owner.device
        device.append(stream, _Sent(lambda: [start()], device.claim(stream)))

    def allReduce(self, given, into, count, datatype, op, stream):
        assert op == 0
        pair = [self._memory(each, count, datatype, stream) for each in (given, into)]
        self._collective(stream, lambda: self._owner.inner.iallreduce(*pair))

    def broadcast(self, given, into, count, datatype, root, stream):
        data = self._memory(into, count, datatype, stream)
        self._collective(stream, lambda: self._owner.inner.ibroadcast(data, root))

    def allGather(self, given, into, count, datatype, stream):
        own = self._memory(given, count, datatype, stream)
        whole = self._memory(into, 2 * count, datatype, stream)
        self._collective(stream, lambda: self._owner.inner.iallgather(own, whole, [count] * 2))

    def reduceScatter(self, given, into, count, datatype, op, stream):
        assert op == 0
        whole = self._memory(given, 2 * count, datatype, stream)
        part = self._memory(into, count, datatype, stream)
        self._collective(stream, lambda: self._owner.inner.ireduce_scatter(whole, part))

    def check_async_error(self):
        assert self.ended is None

    def destroy(self):
        self.ended = "destroy"

    def abort(self):
        self.ended = "abort"


class ProcessNccl:
    """cupy's module of NCCL, for one of two ranks.

    Args:
        device: The device.
        inner: A transport of its own between the two.
    """

    available = True

    def __init__(self, device, inner):
        assert inner.size == 2
        self.device, self.inner, self.made = device, inner, []
        self.group, self.stream = [], None

    def library(self):
        numbers = iter(range(1, 100))
        return CupyBindings(self, lambda _: self.device.stream(next(numbers)))

    def get_unique_id(self):
        assert self.inner.rank == 0, "the lower rank of a pair makes it"
        return bytes([len(self.made), *range(129, 256)])

    def NcclCommunicator(self, size, identity, place):
        assert (size, place, len(identity), type(identity)) == (2, self.inner.rank, 128, bytes)
        self.made.append(_Communicator(self, identity[0]))
        return self.made[-1]

    def groupStart(self):
        assert not self.group

    def groupEnd(self):
        group, self.group = self.group, []
        held = self.device.claim(self.stream)

        def start():
            other = 1 - self.inner.rank
            one = {"send": self.inner.isend, "recv": self.inner.irecv}
            return [one[kind](tensor, other, tag) for kind, tensor, tag in group]

        self.device.append(self.stream, _Sent(start, held))
