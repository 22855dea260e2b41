"""This rank's endpoint in a group of ranks: control messages, and tensors by sender and tag."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from asyncddp.errors import MismatchError
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.sockets.connection import BulkReceive, BulkSend, Payload
from asyncddp.transport.sockets.frames import CREDIT_BYTES, EAGER_BYTES, FrameHeader, FrameKind
from asyncddp.transport.sockets.socket_mesh import SocketMesh


class MeshRequest:
    """Send or receive of a tensor over the socket mesh; ``peer`` is a world rank."""

    def __init__(self, mesh: SocketMesh, peer: int, on_abandon: Callable[[], object]) -> None:
        self._mesh, self.peer, self._on_abandon = mesh, peer, on_abandon
        self.completed = self.abandoned = False
        self.error: Exception | None = None

    def complete(self) -> None:
        """Record that the transfer has completed."""
        self.completed = True

    def done(self) -> bool:
        """Make progress, and test for completion; raise the error of a failed transfer."""
        if self.completed:
            return True
        with self._mesh.lock:
            self._mesh.progress()
        return self.test()

    def test(self) -> bool:
        """Test for completion without progress."""
        error = None if self.completed else self.error or self._mesh.error_of(self.peer)
        if error is not None:
            raise error
        return self.completed

    def abandon(self) -> None:
        """Give up: a receive discards its data, a send not yet accepted is withdrawn."""
        with self._mesh.lock:
            if not (self.completed or self.abandoned):
                self.abandoned = True
                self._on_abandon()


class _PostedReceive(MeshRequest):
    """Posted receive, with its destination memory."""

    def __init__(self, mesh: SocketMesh, peer: int, out: memoryview) -> None:
        super().__init__(mesh, peer, self._leave)
        self.out = out
        self.bulk: BulkReceive | None = None

    def _leave(self) -> None:
        if self.bulk is not None:
            self.bulk.abandon()


class _AnnouncedSend(NamedTuple):
    """Announced large tensor whose receiver is not known to be ready."""

    request: MeshRequest
    bulk: BulkSend
    size: int
    credit: int  # bytes that go unasked


class GroupEndpoint:
    """This rank's endpoint for messages in a group of ranks.

    ``members`` are the group's world ranks.
    """

    def __init__(self, mesh: SocketMesh, group: int, members: Sequence[int]) -> None:
        self._mesh, self._group, self.members = mesh, group, members
        self._place = {member: rank for rank, member in enumerate(members)}
        self.inbox: deque[tuple[int, bytes]] = deque()
        self._posted: dict[tuple[int, int], deque[_PostedReceive]] = {}
        self._unexpected: dict[tuple[int, int], deque[tuple[FrameHeader, Payload]]] = {}
        self._announced: dict[int, _AnnouncedSend] = {}
        self._unasked: Counter[int] = Counter()  # bytes of them that go, or went, by receiver
        self._near = set(mesh.world.machine_ranks())
        mesh.open_endpoint(group, self)

    def post(self, peer: int, message: bytes) -> None:
        """Send a control message to a rank of the group."""
        header = FrameHeader(FrameKind.MESSAGE, 0, self._group, 0, len(message))
        with self._mesh.lock:
            self._send(self.members[peer], header, message)

    def _send(
        self,
        member: int,
        header: FrameHeader,
        payload: bytes | memoryview = b"",
        on_sent: Callable[[], object] | None = None,
    ) -> None:
        if member != self._mesh.rank:
            self._mesh.send_frame(member, header, payload, on_sent)
            return
        self.on_frame(member, header, bytes(payload))
        if on_sent is not None:
            on_sent()

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> MeshRequest:
        """Start to send a tensor: small ones at once, large ones after an announcement."""
        member, memory = self.members[peer], _memory(data)
        size = len(memory)
        with self._mesh.lock:
            if size <= EAGER_BYTES or member == self._mesh.rank:
                request = MeshRequest(self._mesh, member, bool)
                header = FrameHeader(FrameKind.EAGER, tag, self._group, 0, size)
                self._send(member, header, memory, request.complete)
                return request
            number = self._mesh.next_number()
            request = MeshRequest(self._mesh, member, partial(self._withdraw, member, number))
            credit = 0 if member in self._near else min(size, CREDIT_BYTES - self._unasked[member])
            bulk = BulkSend(number, memory, request.complete, credit)
            self._announced[number] = _AnnouncedSend(request, bulk, size, credit)
            self._unasked[member] += credit
            self._send(member, FrameHeader(FrameKind.RTS, tag, self._group, number, size))
            if credit:
                self._mesh.send_bulk(member, bulk)
            return request

    def _answered(self, member: int, number: int) -> _AnnouncedSend | None:
        """Remove an announced tensor that the receiver has answered, and free its credit."""
        sent = self._announced.pop(number, None)
        if sent is not None:
            self._unasked[member] -= sent.credit
        return sent

    def _withdraw(self, member: int, number: int) -> None:
        if (sent := self._answered(member, number)) is not None:
            sent.bulk.credit = 0
            self._send(member, FrameHeader(FrameKind.WITHDRAWN, 0, self._group, number))

    def _continue(self, member: int, bulk: BulkSend) -> None:
        """Send the rest of a tensor whose receiver is ready."""
        waits, bulk.credit = not bulk.credit, len(bulk.left)
        if waits and bulk.credit:
            self._mesh.send_bulk(member, bulk)

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> MeshRequest:
        """Start to receive a tensor of exactly this size."""
        member = self.members[peer]
        receive = _PostedReceive(self._mesh, member, _memory(out))
        with self._mesh.lock:
            key = member, tag
            waiting = self._unexpected.get(key)
            if not waiting:
                self._posted.setdefault(key, deque()).append(receive)
                return receive
            header, payload = waiting.popleft()
            if not waiting:
                del self._unexpected[key]
            self._match(receive, header, payload)
        return receive

    def probe(self, tag: int) -> int | None:
        """Return a rank with an unreceived tensor of this tag; None if there is none."""
        return next((self._place[peer] for peer, sent in self._unexpected if sent == tag), None)

    # frames

    def on_frame(self, peer: int, header: FrameHeader, payload: Payload) -> None:
        """Handle a frame from a rank of the world."""
        if header.kind is FrameKind.MESSAGE:
            assert not isinstance(payload, BulkReceive)
            self.inbox.append((self._place[peer], bytes(payload)))
        elif header.kind in (FrameKind.EAGER, FrameKind.RTS):
            receive = self._posted_receive((peer, header.tag))
            if receive is None:
                self._unexpected.setdefault((peer, header.tag), deque()).append((header, payload))
            else:
                self._match(receive, header, payload)
        elif header.kind is FrameKind.WITHDRAWN:
            self._forget(peer, header.number)
        elif (sent := self._answered(peer, header.number)) is None:
            return
        elif header.kind is FrameKind.CTS:
            self._continue(peer, sent.bulk)
        else:
            sent.bulk.credit = 0
            sent.request.error = self._mismatch(self._mesh.rank, sent.size, peer, header.size)
            self._send(peer, FrameHeader(FrameKind.WITHDRAWN, 0, self._group, header.number))

    def _posted_receive(self, key: tuple[int, int]) -> _PostedReceive | None:
        """Take the first posted receive for a sender and tag that is not abandoned."""
        posted = self._posted.get(key)
        while posted:
            receive = posted.popleft()
            if not posted:
                del self._posted[key]
            if not receive.abandoned:
                return receive
        return None

    def _match(self, receive: _PostedReceive, header: FrameHeader, payload: Payload) -> None:
        peer, number, rank = receive.peer, header.number, self._mesh.rank
        fits = header.size == len(receive.out)
        if not fits:
            receive.error = self._mismatch(peer, header.size, rank, len(receive.out))
        if not isinstance(payload, BulkReceive):
            if fits:
                receive.out[:] = payload
                receive.complete()
        elif fits:
            receive.bulk = payload
            self._send(peer, FrameHeader(FrameKind.CTS, 0, self._group, number))
            payload.give(receive.out, receive.complete)
        else:
            payload.abandon()
            refusal = FrameHeader(FrameKind.REFUSED, 0, self._group, number, len(receive.out))
            self._send(peer, refusal)

    def _forget(self, peer: int, number: int) -> None:
        """Drop the announcement of a tensor that will not be sent."""
        for key, waiting in list(self._unexpected.items()):
            kept = deque(
                one for one in waiting if (key[0], one[0].number or None) != (peer, number)
            )
            self._unexpected[key] = kept
            if not kept:
                del self._unexpected[key]

    def _mismatch(self, source: int, sent: int, target: int, expected: int) -> MismatchError:
        places = self._place[source], self._place[target]
        return MismatchError(
            f"rank {places[0]} sent {sent} bytes to rank {places[1]}, which expected {expected}"
        )

    def close(self) -> None:
        """Accept no more frames, and drop tensors that no receive has matched."""
        self._mesh.endpoints[self._group] = _CLOSED
        self.inbox.clear()
        self._posted.clear()
        for waiting in self._unexpected.values():
            for _, payload in waiting:
                if isinstance(payload, BulkReceive):
                    payload.abandon()
        self._unexpected.clear()


class _ClosedEndpoint:
    """Endpoint of a closed group, which drops all frames."""

    def on_frame(self, peer: int, header: FrameHeader, payload: Payload) -> None:
        """Drop the frame and the data of a tensor that it announces."""
        if isinstance(payload, BulkReceive):
            payload.abandon()


_CLOSED = _ClosedEndpoint()


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, which the view keeps alive."""
    return as_bytes(tensor).numpy().data
