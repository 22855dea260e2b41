"""Connection of the socket mesh, which sends and receives frames without blocking."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from asyncddp.transport.sockets.frames import HEADER_BYTES, FrameHeader, FrameKind, unpack_header
from asyncddp.transport.tcp_send_queue import limit_send_queue

_READ_BYTES = 1 << 18  # of one read of headers and short payloads
_HELLO_BYTES = 1 << 8  # of one whose other end may be anybody
_BATCH_BYTES = 1 << 16  # of short frames in one call
_READS = 16  # calls before other connections have their turn


@dataclass
class BulkSend:
    """Large tensor being sent to one peer.

    Attributes:
        number: Number that identifies the tensor to the peer.
        left: The bytes that are left.
        on_sent: Called when all of them are sent.
        credit: How many of them may be sent now; with none it waits outside of the queue.
    """

    number: int
    left: memoryview
    on_sent: Callable[[], None]
    credit: int


class PayloadTarget:
    """Memory that a payload is read into; it may be replaced while the payload arrives."""

    def __init__(self, view: memoryview, on_filled: Callable[[], None]) -> None:
        self.view, self.on_filled = view, on_filled


class BulkReceive:
    """Large tensor announced by a peer: the number of bytes to come, and their destination.

    Bytes that arrive before :meth:`give` has set the destination are kept.

    Attributes:
        left: How many bytes are yet to come.
    """

    def __init__(self, size: int) -> None:
        self.left = size
        self._memory: memoryview | None = None
        self._kept: list[memoryview] | None = []  # None for bytes that nobody wants
        self._on_received: Callable[[], None] | None = None
        self._arriving: PayloadTarget | None = None

    def next_target(self, size: int) -> PayloadTarget:
        """Return the memory of the next piece."""
        self.left -= size
        if self._memory is None:
            piece = memoryview(bytearray(size))
            if self._kept is not None:
                self._kept.append(piece)
        else:
            piece, self._memory = self._memory[:size], self._memory[size:]
        self._arriving = PayloadTarget(piece, self._on_piece)
        return self._arriving

    def _on_piece(self) -> None:
        self._arriving = None
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        if not self.left and self._arriving is None and self._on_received is not None:
            self._on_received()

    def give(self, memory: memoryview, on_received: Callable[[], None]) -> None:
        """Set the destination of all bytes, including received ones; call back when complete."""
        for kept in self._kept or ():
            piece, memory = memory[: len(kept)], memory[len(kept) :]
            piece[:] = kept
            if self._arriving is not None and self._arriving.view is kept:
                self._arriving.view = piece
        self._kept = None
        self._memory, self._on_received = memory, on_received
        self._end_if_complete()

    def abandon(self) -> None:
        """Discard the bytes that are still to come."""
        self._memory = self._kept = self._on_received = None
        if self._arriving is not None:
            self._arriving.view = memoryview(bytearray(len(self._arriving.view)))


class BulkReceives(dict[tuple[int, int], BulkReceive]):
    """Large tensors announced by peers, keyed by sender and number."""

    def target(self, peer: int, header: FrameHeader) -> PayloadTarget:
        """Return the memory for a piece; raise ValueError if it was not announced."""
        receive = self.get((peer, header.number))
        if receive is None or receive.left < header.size:
            raise ValueError(f"{header.size} bytes that were not announced")
        if receive.left == header.size:
            del self[peer, header.number]
        return receive.next_target(header.size)


Payload: TypeAlias = bytes | bytearray | BulkReceive
"""Bytes of a frame, or of an announced tensor what is to come."""


class GroupFrameHandler(Protocol):
    """Interface of a group's endpoint on this rank, which receives the group's frames."""

    def on_frame(self, peer: int, header: FrameHeader, payload: Payload) -> None:
        """Handle a frame from a rank of the world."""
        ...


class Connection:
    """Connected non-blocking stream socket that carries frames in both directions.

    Attributes:
        peer: Rank of the other end; None until its HELLO has come.
        proven: True once the other end has shown that it is that rank.
        wants_to_write: True while there is something to send.
        said_bye: True once the other end has said that it leaves.
    """

    def __init__(self, sock: socket.socket, peer: int | None, piece: Callable[[], int]) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.peer, self._piece = sock, peer, piece
        self.proven = self.said_bye = False
        self._frames: deque[tuple[bytes, Callable[[], object] | None]] = deque()
        self._bulk: deque[BulkSend] = deque()
        self._batch: list[memoryview] = []  # what the system has not taken yet
        self._frames_sent: list[Callable[[], object]] = []  # of the batch
        self._bulk_sent: Callable[[], object] | None = None
        self._buffer = bytearray(_HELLO_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # of the bytes in the buffer that are not parsed yet
        self._target: PayloadTarget | None = None
        self._filled = 0

    def trust(self, peer: int) -> None:
        """Record that the other end has proved to be a rank; use a larger read size from now on."""
        self.peer, self.proven = peer, True
        self._buffer = self._buffer.ljust(_READ_BYTES, b"\0")
        self._view = memoryview(self._buffer)
        if self.socket.family != socket.AF_UNIX:
            limit_send_queue(self.socket)

    @property
    def wants_to_write(self) -> bool:
        """Tell whether unsent data is queued."""
        return bool(self._batch or self._frames or self._bulk)

    # sending

    def send_frame(
        self,
        header: FrameHeader,
        payload: bytes | memoryview = b"",
        on_sent: Callable[[], object] | None = None,
    ) -> None:
        """Queue a copy of a frame; short frames go ahead of the pieces of large tensors.

        ``on_sent`` is called once the system has taken it, or it was dropped.
        """
        self._frames.append((header.pack() + bytes(payload), on_sent))

    def send_bulk(self, send: BulkSend) -> None:
        """Queue a large tensor that has credit; large tensors take turns piece by piece."""
        self._bulk.append(send)

    def discard_output(self) -> None:
        """Drop unsent data."""
        self._frames_sent += [on_sent for _, on_sent in self._frames if on_sent is not None]
        self._frames.clear()
        self._bulk.clear()
        self._batch.clear()
        self._bulk_sent = None
        self._end_batch()

    def _end_batch(self) -> None:
        ended, self._frames_sent, self._bulk_sent = [*self._frames_sent, self._bulk_sent], [], None
        for on_sent in ended:
            if on_sent is not None:
                on_sent()

    def flush(self) -> None:
        """Send until the system accepts no more; raise OSError if the connection is broken."""
        while self._batch or self._next_batch():
            try:
                taken = self.socket.sendmsg(self._batch)
            except BlockingIOError:
                return
            while self._batch and taken >= len(self._batch[0]):
                taken -= len(self._batch.pop(0))
            if self._batch:
                self._batch[0] = self._batch[0][taken:]
            else:
                self._end_batch()

    def _next_batch(self) -> bool:
        """Take short frames, and a piece of one large tensor, as the next batch."""
        frames: list[bytes] = []
        while self._frames and sum(map(len, frames)) < _BATCH_BYTES and len(frames) < 64:
            frame, on_sent = self._frames.popleft()
            frames.append(frame)
            self._frames_sent += [on_sent] if on_sent is not None else []
        self._batch += [memoryview(b"".join(frames))] if frames else []
        while self._bulk and not self._bulk[0].credit:
            self._bulk.popleft()
        if not self._frames and self._bulk:
            send = self._bulk.popleft()
            size = min(self._piece(), send.credit)
            piece, send.left = send.left[:size], send.left[size:]
            send.credit -= size
            header = FrameHeader(FrameKind.DATA, number=send.number, size=len(piece)).pack()
            self._batch += [memoryview(header), piece]
            if send.credit:
                self._bulk.append(send)
            elif not len(send.left):
                self._bulk_sent = send.on_sent
        return bool(self._batch)

    # receiving

    def receive(
        self, payload_target: Callable[[Connection, FrameHeader], PayloadTarget | None]
    ) -> Iterator[tuple[FrameHeader, bytes]]:
        """Read available data: yield short frames whole, and read other payloads into targets.

        If ``payload_target`` returns memory for a frame, the payload is read into it. Raises
        EOFError when the other end has closed the connection, OSError if it is broken, and
        ValueError if the bytes are not valid frames.
        """
        for _ in range(_READS):
            target = self._target
            space = self._view[self._end :] if target is None else target.view[self._filled :]
            try:
                count = self.socket.recv_into(space)
            except BlockingIOError:
                return
            if count == 0:
                raise EOFError
            if target is None:
                self._end += count
                yield from self._parse(payload_target)
            else:
                self._fill(target, count)
            if count < len(space):
                return  # no more has come

    def _fill(self, target: PayloadTarget, count: int) -> None:
        self._filled += count
        if self._filled == len(target.view):
            self._target, self._filled = None, 0
            target.on_filled()

    def _parse(
        self, payload_target: Callable[[Connection, FrameHeader], PayloadTarget | None]
    ) -> Iterator[tuple[FrameHeader, bytes]]:
        while self._end - self._start >= HEADER_BYTES:
            header = unpack_header(self._buffer, self._start)
            self._start += HEADER_BYTES
            size, ready = header.payload_bytes, self._end - self._start
            target = payload_target(self, header) if size else None
            if target is None and size <= ready:
                yield header, bytes(self._view[self._start : self._start + size])
                self._start += size
                continue
            if target is None:
                if size > len(self._buffer) - HEADER_BYTES:
                    raise ValueError(f"a frame of {size} bytes")
                self._start -= HEADER_BYTES  # until the rest has come
                break
            count = min(size, ready)
            target.view[:count] = self._view[self._start : self._start + count]
            self._start += count
            self._target = target
            self._fill(target, count)
        self._compact()

    def _compact(self) -> None:
        """Move the unparsed bytes, the beginning of a frame, to the start of the buffer."""
        left = self._end - self._start
        if self._start:
            self._buffer[:left] = self._buffer[self._start : self._end]
        self._start, self._end = 0, left

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
