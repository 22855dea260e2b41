"""A stand-in for NCCL behind cupy: checks what it is handed, and does it when all ranks have come.

Ranks are threads of one process. A call is queued on its stream; the data move once the call is
first in its stream on every rank. What NCCL waits for on the calling thread is waited for as well:
opening, and the first call of a kind, in which it connects the ranks.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time

import torch

from asyncddp.transport.cuda.nccl.cupy_bindings import CupyBindings
from tests.support.late_device import Late

__all__ = ["FakeNccl", "NcclError"]

TYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    4: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}
"""``ncclDataType_t`` of nccl.h."""
SECONDS = 60.0


class NcclError(RuntimeError):
    """As cupy's."""


class _Call:
    """One call on one rank: what it was handed, checked at once and used later."""

    def __init__(self, kind, comm, given, into, datatype, key, given_count, into_count, **more):
        dtype = TYPES[datatype]
        held = comm.owner.fake.device.held.get(key, [])
        self.kind, self.more, self.key, self.dtype = kind, more, key, dtype
        self.given = None if given is None else memory(given, given_count, dtype, held)
        self.into = None if into is None else memory(into, into_count, dtype, held)
        self.form = (kind, dtype, given_count, into_count, tuple(sorted(more.items())))


def memory(pointer, count, dtype, held):
    """What lies at an address, as a tensor; the stream must have been told that it is used."""
    assert pointer, "NCCL would be handed no memory"
    assert count > 0, "NCCL would be handed no elements"
    first, last = pointer, pointer + count * dtype.itemsize
    assert any(t.data_ptr() <= first and last <= t.data_ptr() + t.nbytes for t in held), (
        "NCCL would be handed memory that its stream does not hold"
    )
    room = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(room, dtype=dtype)


class _Kernel(Late):
    """A group of calls, queued on one rank's stream."""

    def __init__(self, comm, calls, number, held):
        kinds = ", ".join(call.kind for call in calls)
        super().__init__(f"rank {comm.owner.rank}'s {kinds} (number {number} of {comm.group.name})")
        self.comm, self.calls, self.number = comm, calls, number
        self.held, self.rank, self.resident = held, comm.owner.rank, False

    def ready(self):
        if self.comm.ended == "abort":
            return True
        others = self.comm.group.kernels[self.number]
        return self.over or all(one is not None and one.resident for one in others)

    def run(self):
        if self.over or self.comm.ended == "abort":
            self.over = True
            return
        kernels = self.comm.group.kernels[self.number]
        perform(kernels)
        for kernel in kernels:
            kernel.over = True

    def needs(self):
        return [] if self.over else [k for k in self.comm.group.kernels[self.number] if k]


def perform(kernels):
    """Do what all ranks of a communicator have called for."""
    if kernels[0].calls[0].kind in ("send", "recv"):
        for one, other in itertools.product(range(len(kernels)), repeat=2):
            sends = [c for c in kernels[one].calls if c.kind == "send" and c.more["peer"] == other]
            takes = [c for c in kernels[other].calls if c.kind == "recv" and c.more["peer"] == one]
            assert [s.given.nbytes for s in sends] == [t.into.nbytes for t in takes], (
                f"sends and receives do not fit: {kernels[one].what}, {kernels[other].what}"
            )
            for send, take in zip(sends, takes, strict=True):
                take.into.copy_(send.given)
        return
    for calls in zip(*(kernel.calls for kernel in kernels), strict=True):
        assert len({call.form for call in calls}) == 1, [call.form for call in calls]
        kind, more = calls[0].kind, calls[0].more
        every = torch.stack([call.given for call in calls if call.given is not None])
        if kind in ("allReduce", "reduceScatter"):
            assert more["op"] in (0, 2)
            total = every.sum(0, dtype=every.dtype) if more["op"] == 0 else every.amax(0)
            parts = [total] * len(calls) if kind == "allReduce" else total.chunk(len(calls))
        else:
            parts = [every[more["root"]] if kind == "broadcast" else every.reshape(-1)] * len(calls)
        for call, part in zip(calls, parts, strict=True):
            call.into.copy_(part)


class _Group:
    """A communicator, for all its ranks."""

    def __init__(self, size, name):
        self.size, self.name = size, name
        self.places, self.kernels, self.connected = set(), [], {}


class _Communicator:
    """cupy's communicator, for one rank."""

    def __init__(self, owner, group, place):
        self.owner, self.group, self.place = owner, group, place
        self.ended, self.problem, self._count, self._key = None, None, 0, None

    def _check(self):
        assert self.ended is None, f"used after {self.ended}"
        if self.problem:
            raise NcclError(self.problem)

    def _add(self, call):
        self._check()
        self._key = self._key or call.key
        assert call.key == self._key, "one communicator has one stream"
        assert isinstance(call.key, int), "not on a stream of its own"
        self.owner.add(self, call)

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        sizes = count, count
        self._add(_Call("allReduce", self, sendbuf, recvbuf, datatype, stream, *sizes, op=op))

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        sizes = recvcount * self.group.size, recvcount
        self._add(_Call("reduceScatter", self, sendbuf, recvbuf, datatype, stream, *sizes, op=op))

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        sizes = count, count * self.group.size
        self._add(_Call("allGather", self, sendbuf, recvbuf, datatype, stream, *sizes))

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        sizes = count, count
        self._add(_Call("broadcast", self, sendbuff, recvbuff, datatype, stream, *sizes, root=root))

    def send(self, sendbuf, count, datatype, peer, stream):
        self._add(_Call("send", self, sendbuf, None, datatype, stream, count, 0, peer=peer))

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._add(_Call("recv", self, None, recvbuf, datatype, stream, 0, count, peer=peer))

    def enter(self, calls):
        """Queue what belongs together."""
        kind = "messages" if calls[0].kind in ("send", "recv") else calls[0].kind
        fake, number = self.owner.fake, self._count
        self._count += 1
        with fake.device.lock:
            kernels = self.group.kernels
            if number == len(kernels):
                kernels.append([None] * self.group.size)
            held = fake.device.claim(self._key)
            kernel = kernels[number][self.place] = _Kernel(self, calls, number, held)
            fake.device.append(self._key, kernel)
            fake.groups.append((self.owner.rank, [call.kind for call in calls]))
            fake.meet(self.group.connected.setdefault(kind, set()), self, f"connecting {kind}")

    def check_async_error(self):
        self._check()

    def _end(self, how):
        with self.owner.fake.device.lock:
            assert self.ended is None, f"{how} after {self.ended}"
            mine = [kernels[self.place] for kernels in self.group.kernels]
            busy = [kernel for kernel in mine if kernel is not None and not kernel.over]
            assert how == "abort" or not busy, f"destroyed under way: {busy[0].what}"
            self.ended = how

    def destroy(self):
        self._end("destroy")

    def abort(self):
        self._end("abort")


class _Module:
    """cupy's module of NCCL, for one rank."""

    available, NcclError = True, NcclError

    def __init__(self, fake, rank):
        self.fake, self.rank, self.made = fake, rank, []
        self._here = threading.local()

    def get_unique_id(self):
        made = self.fake.identity()
        return made if self.fake.cupy >= 14 else tuple(v - 256 if v > 127 else v for v in made)

    def NcclCommunicator(self, size, identity, place):
        expected = bytes if self.fake.cupy >= 14 else tuple
        if not isinstance(identity, expected):
            raise TypeError(f"commId: expected {expected}, got {type(identity)}")
        if expected is tuple:
            assert all(-128 <= value < 128 for value in identity)
        group = self.fake.opened(bytes(value % 256 for value in identity), size)
        comm = _Communicator(self, group, place)
        with self.fake.device.lock:
            assert place not in group.places
            self.fake.meet(group.places, comm, "opening")
        self.made.append(comm)
        return comm

    def groupStart(self):
        assert getattr(self._here, "group", None) is None
        self._here.group = []

    def groupEnd(self):
        group, self._here.group = self._here.group, None
        for comm in {comm for comm, _ in group}:
            comm.enter([call for other, call in group if other is comm])

    def add(self, comm, call):
        if getattr(self._here, "group", None) is None:
            assert call.kind not in ("send", "recv"), "messages that go both ways need a group"
            comm.enter([call])
        else:
            self._here.group.append((comm, call))


class FakeNccl:
    """NCCL for ranks that are threads.

    Attributes:
        device: The device of all of them.
        cupy: Its version, which decides what an identity is.
        groups: Who entered what, in order: ranks and kinds of calls.
    """

    def __init__(self, device, cupy=14):
        self.device, self.cupy, self.groups, self.modules = device, cupy, [], {}
        self._streams = itertools.count(1)
        self._identities = {}
        self._arrived = threading.Condition(device.lock)

    def library(self, rank):
        """cupy, as a rank sees it."""
        module = self.modules[rank] = _Module(self, rank)
        return CupyBindings(module, lambda _: self.device.stream(next(self._streams), rank))

    def identity(self):
        with self.device.lock:
            number = len(self._identities)
            made = bytes([number, *range(193, 256), *range(64)])
            self._identities[made] = None
        return made

    def opened(self, identity, size):
        with self.device.lock:
            assert identity in self._identities, "all ranks take the identity that one has made"
            if self._identities[identity] is None:
                name = f"communicator {identity[0]}"
                self._identities[identity] = _Group(size, name)
            group = self._identities[identity]
            assert group.size == size
            return group

    def meet(self, places, comm, what):
        """Wait on this thread until all ranks have come here; only once."""
        if comm.place in places:
            return
        places.add(comm.place)
        self._arrived.notify_all()
        if len(places) == comm.group.size:
            return
        thread = threading.current_thread().name
        apart = comm.group.size > 2 or "messages" not in what or thread == "asyncddp-nccl-opening"
        assert apart, f"{what} holds up the thread {thread}"
        deadline = time.monotonic() + SECONDS
        while len(places) < comm.group.size:
            if time.monotonic() > deadline or self.device.problem is not None:
                raise NcclError(f"NCCL_ERROR_SYSTEM_ERROR: nobody else came: {what}")
            self._arrived.wait(0.05)
