"""What one verb may do: exchange with peers under its name, join collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from asyncddp.engine.mailbox import Mailbox
from asyncddp.engine.messages import Key
from asyncddp.engine.posting import Arrival, Departure, Form, Posting
from asyncddp.engine.recorded import note_collective
from asyncddp.engine.stream import Stream
from asyncddp.errors import PeerError
from asyncddp.memory.streams import DeviceStreams
from asyncddp.transport.contract import Transfer

__all__ = ["Desk", "Joined", "Rows"]

Rows: TypeAlias = tuple[str, Mapping[int, str]]

_GRACE = 0.3  # seconds for a form that says what a wire has only noticed


class Joined:
    """Wait for this: a collective has ended.

    Where a wire notices that ranks have met in different collectives, it cannot say which; their
    forms can, and are on their way.
    """

    def __init__(self, transfer: Transfer, posting: Posting, others: Sequence[int]) -> None:
        self._transfer, self._posting, self._others = transfer, posting, others
        self._problem: PeerError | None = None
        self._deadline = 0.0

    def done(self) -> bool:
        """Whether it has."""
        self._posting.raise_if_failed()
        if self._problem is None:
            try:
                return self._transfer.done()
            except PeerError as problem:
                self._problem, self._deadline = problem, time.monotonic() + _GRACE
        if time.monotonic() > self._deadline:
            raise self._problem
        return False

    def missing(self) -> list[tuple[int, Key]]:
        """Everybody else, since a collective does not tell who is late."""
        return [(peer, self._posting.key) for peer in self._others]


class Desk:
    """One verb's access to the engine. All calls are made under the engine's lock.

    Args:
        mailbox: The rank's mailbox.
        verb: The verb's name.
        key: What this use of it is called.
        turn: How often this verb was used under this name before: the round of a schedule.
        check: Whether targets must confirm.
    """

    def __init__(self, mailbox: Mailbox, verb: str, key: Key, turn: int, *, check: bool) -> None:
        self._mailbox, self.check = mailbox, check
        self.verb, self.key, self.turn = verb, key, turn
        self._postings: list[Posting] = []
        self._streams: list[Stream] = []
        self._transfers: list[Transfer] = []
        self._part = 0

    def exchange(
        self,
        form: Form,
        sources: Iterable[int],
        targets: Iterable[int],
        streams: DeviceStreams | None = None,
        *,
        borrows: bool = False,
        rows: Rows | None = None,
    ) -> Posting:
        """Open an exchange with peers; a verb with several gives each a name of its own.

        Args:
            form: What they agree about.
            sources: Ranks from which a tensor comes.
            targets: Ranks to which one is sent.
            streams: Of the device on which the tensors lie; None on the host.
            borrows: Whether what comes is read where it lies, and each arrival then released.
            rows: This rank's weights, and what its topology gives each target, to be compared.

        Raises:
            MismatchError: What has come already contradicts it.
        """
        posting = Posting(self._next_key(), form, sources, targets, borrows=borrows)
        posting.streams = streams
        posting.row, posting.rows = rows or ("", {})
        return self._opened(posting)

    def stream(
        self,
        form: Form,
        sources: Iterable[int],
        targets: Mapping[int, float],
        rows: Rows | None = None,
    ) -> Stream:
        """Open an exchange with neighbours of which all that goes one way has the same form.

        Args:
            form: What they agree about.
            sources: Ranks from which a tensor comes.
            targets: Ranks to which ours goes, and with which factor; those that do not read it
                from our lane are sent it with :meth:`send`.
            rows: This rank's weights, and what its topology gives each target, to be compared.

        Raises:
            MismatchError: What has come already contradicts it.
        """
        posting = Posting(self._next_key(), form, sources, targets)
        posting.row, posting.rows = rows or ("", {})
        channels = self._mailbox.channels
        posting.channel = channel = channels.find(posting.key, form, targets)
        alike = len(set(targets.values())) == 1 and not self.check
        if channel is not None and channel.lane is not None and alike:
            posting.by_lane = posting.targets & channel.readers
        cut = None if channel is None else channel.cut
        readers = sorted(posting.by_lane)
        stream = Stream(channels, channel, posting.key, cut, posting.arrivals, readers)
        self._streams.append(stream)
        stream.posting = self._opened(posting)
        return stream

    def adopt(self, stream: Stream, form: Form) -> None:
        """Take over an exchange that was begun without the engine.

        Raises:
            MismatchError: What has come already contradicts it.
        """
        sources = [source.peer for source in stream.sources]
        posting = Posting(stream.key, form, sources, stream.targets)
        posting.by_lane, posting.channel = posting.targets, stream.channel
        self._streams.append(stream)
        stream.posting = self._opened(posting)

    def _next_key(self) -> Key:
        name = self.key.name if self._part == 0 else f"{self.key.name}/{self._part}"
        self._part += 1
        return Key(name, self.key.step)

    def _opened(self, posting: Posting) -> Posting:
        self._mailbox.open(posting, check=self.check)
        self._postings.append(posting)
        return posting

    def send(self, exchange: Posting | Stream, peer: int, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor to a target of an open exchange."""
        posting = exchange.posting if isinstance(exchange, Stream) else exchange
        if posting is not None:
            self._mailbox.send(posting, peer, tensor)

    def show(
        self,
        posting: Posting,
        targets: Mapping[int, float],
        tensor: torch.Tensor,
        *,
        lasting: bool,
    ) -> None:
        """Send multiples of a contiguous tensor on a device, to be read where they lie.

        Args:
            posting: An open exchange.
            targets: The factor for each target.
            tensor: The tensor.
            lasting: Whether it stays as it is until the exchange is over.
        """
        for factor in sorted(set(targets.values())):
            peers = sorted(peer for peer, other in targets.items() if other == factor)
            self._mailbox.show(posting, peers, tensor, factor, lasting=lasting)

    def collective(
        self,
        group: Sequence[int],
        form: Form,
        start: Callable[[], Transfer],
    ) -> Generator[Arrival | Joined | Departure, None, None]:
        """Join a collective of the ranks in ``group``.

        Its form goes to the next rank of the group, so that ranks which meet in different
        collectives, dtypes or shapes find out while the collective itself is under way, and tell
        all: who has ended it by then raises in its next verb. In check mode it goes to all, and
        nothing starts, and nobody returns, before all forms are known to agree.

        Args:
            group: World ranks that take part, in the same order on all of them.
            form: What all must agree about.
            start: Starts the transfer.
        """
        rank = self._mailbox.rank
        place = group.index(rank)
        others = [peer for peer in group if peer != rank]
        before, after = group[place - 1], group[(place + 1) % len(group)]
        sources, targets = ([before], [after]) if others and not self.check else (others, others)
        posting = self.exchange(form, sources, targets)
        posting.audience = frozenset(others)
        for peer in targets:
            self._mailbox.announce(posting, peer)
        for peer in sources if self.check else ():
            yield posting.arrivals[peer]
        begun = time.monotonic_ns()
        transfer = start()
        self._transfers.append(transfer)
        yield Joined(transfer, posting, others)
        if self._mailbox.recorder is not None:
            note_collective(self._mailbox.recorder, posting, len(group), begun)
        self._transfers.remove(transfer)
        for peer in sources:
            yield posting.arrivals[peer]
        if others:
            yield posting.sent()

    def raise_if_failed(self) -> None:
        """Raise what made any of the exchanges fail; an earlier one may be refused late."""
        for posting in self._postings:
            posting.raise_if_failed()

    def close(self, error: PeerError | None) -> None:
        """End all exchanges, with the error that ended the verb."""
        for transfer in self._transfers:
            transfer.abandon()
        for stream in self._streams:
            stream.close(failed=error is not None)
        for posting in self._postings:
            self._mailbox.close(posting, error)
            posting.arrivals.clear()  # they know each other: without this, memory waits for the gc
            posting.channel = None
        self._streams.clear()
        self._postings.clear()
        self._transfers.clear()
