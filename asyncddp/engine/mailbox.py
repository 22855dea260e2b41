"""Matching of what comes with what is expected, by name."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch

from asyncddp.engine.messages import FORM, Confirm, Data, Key, Message, Parcel, Refuse, decode
from asyncddp.engine.outbox import Outbox
from asyncddp.engine.parcels import Parcels
from asyncddp.engine.posting import Arrival, Form, Posting
from asyncddp.engine.recorded import noted
from asyncddp.errors import (
    DeadlockError,
    MismatchError,
    PeerError,
    PeerLeftError,
    WaitTimeoutError,
)
from asyncddp.memory.allocate import empty
from asyncddp.memory.streams import empty_on
from asyncddp.memory.streams_host import HostStreams
from asyncddp.memory.views import from_bytes
from asyncddp.timeline.recorder import Recorder
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.lending import Lending

__all__ = ["Mailbox"]

_REMEMBERED = 4096
_RUN_AHEAD = 64  # uses of a name after which a sender waits for its receivers
_PLAIN = HostStreams()  # for bytes that come from a device and are dropped on the host


_KINDS: dict[str, type[PeerError]] = {
    kind.__name__: kind
    for kind in (DeadlockError, MismatchError, PeerError, PeerLeftError, WaitTimeoutError)
}
"""Errors that travel: whoever waits for a rank that failed so raises the same."""


class _Outcome(NamedTuple):
    """What is remembered of an exchange that has ended."""

    sources: frozenset[int]
    targets: frozenset[int]
    error: PeerError | None


def _over(unwanted: Transfer) -> bool:
    """Whether nothing more comes of a transfer for which nobody waits, well or not."""
    try:
        return unwanted.done()
    except PeerError:
        return True


class Mailbox(Outbox):
    """All exchanges of one rank over one transport. Not thread-safe: the engine's lock guards it.

    Messages that nobody expects yet wait; those that contradict an exchange fail it on both sides.

    Args:
        transport: The wire.
        uses: How often each name was submitted here.
        recorder: Takes notes for the timeline, if there is one.
    """

    def __init__(
        self,
        transport: Transport,
        uses: Mapping[str, int] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(transport, recorder)
        self.rank, self.size = transport.rank, transport.size
        self._uses = {} if uses is None else uses
        self._suspects: set[tuple[int, Key]] = set()
        self._open: dict[Key, Posting] = {}
        self._ended: OrderedDict[Key, _Outcome] = OrderedDict()
        self._early: dict[Key, dict[int, Data]] = defaultdict(dict)
        self._refused: dict[Key, tuple[int, Refuse]] = {}
        self._confirmed: set[tuple[int, Form]] = set()
        self._drains: list[tuple[Transfer, torch.Tensor | None]] = []
        self.parcels = Parcels(transport, self.put, self.flush, self._next_tag, self.complain)

    @property
    def late(self) -> PeerError | None:
        """An error about an exchange that had already ended here; raised by the next verb."""
        return self.channels.late

    @late.setter
    def late(self, error: PeerError | None) -> None:
        """Keep it, for the channels too."""
        self.channels.late = error

    def complain(self, error: PeerError) -> None:
        """Have the next verb raise this."""
        self.late = self.late or error

    def refuses(self, name: str) -> bool:
        """Whether a peer has refused the use of a name that comes next here."""
        return bool(self._refused) and Key(name, self._uses.get(name, 0)) in self._refused

    # exchanges

    def open(self, posting: Posting, *, check: bool) -> None:
        """Start expecting; peers that have never confirmed this form, or all, must confirm.

        Raises:
            MismatchError: Something that came earlier contradicts the exchange, or the key is open.
        """
        key = posting.key
        if key in self._open:
            raise MismatchError(f"rank {self.rank}: {key} is under way already; wait for it first")
        check = check or key.step % _RUN_AHEAD == 0
        posting.unconfirmed = {
            peer
            for peer in posting.targets - posting.by_lane
            if check
            or (peer, posting.form) not in self._confirmed
            or self.channels.offer(posting.channel, peer) is not None
        }
        self._open[key] = posting
        if key in self._refused:
            self._refusal(posting, *self._refused.pop(key))
        for peer, data in self._early.pop(key, {}).items():
            self._match(posting, peer, data)

    def close(self, posting: Posting, error: PeerError | None) -> None:
        """Stop expecting; on failure tell everybody who takes part."""
        self._open.pop(posting.key, None)
        for arrival in posting.arrivals.values():
            arrival.release()
        posting.lent.clear()
        self._ended[posting.key] = _Outcome(posting.sources, posting.targets, error)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        if error is None:
            self._confirmed.update((peer, posting.form) for peer in posting.targets)
            if posting.channel is not None and posting.channel.lane is not None:
                offered = posting.targets & posting.channel.lane.ranks
                posting.channel.readers.update(offered)
            return
        refusal = self._refusal_of(posting.key, error, posting.reason)
        for peer in posting.peers() | posting.audience:
            self.put(peer, refusal)
        for arrival in posting.arrivals.values():
            if arrival.transfer is not None:
                self._drains.append((arrival.transfer, arrival.tensor))
        for transfer in posting.departures:
            transfer.abandon()

    def knows(self, key: Key) -> bool:
        """Whether this rank has submitted the key."""
        return key in self._open or key in self._ended or key.step < self._uses.get(key.base, 0)

    def _outcome(self, key: Key) -> _Outcome | None:
        """What is known of an exchange that has ended here."""
        partners = self.channels.partners(key)
        return self._ended.get(key) or (_Outcome(*partners, None) if partners else None)

    def object_to(self, peer: int, key: Key) -> None:
        """Refuse a peer that waits for this rank in an exchange which leaves that peer out."""
        mine = self._open.get(key) or self._outcome(key)
        if mine is None or mine.error is not None or key.collective:
            return
        if peer not in mine.sources and peer not in mine.targets:
            problem = f"sends nothing to rank {peer}: {_neighbors(mine)}"
            self.put(peer, Refuse(key, f"rank {self.rank} {problem}", origin=self.rank))

    def unmatched(self, peer: int) -> list[Data]:
        """What has come from a peer and fits nothing yet."""
        return [waiting[peer] for waiting in self._early.values() if peer in waiting]

    # what comes

    def receive(self, peer: int, bundle: bytes) -> list[Message]:
        """Deliver a bundle; gives back the messages that are not about exchanges."""
        others: list[Message] = []
        for message in decode(bundle):
            if isinstance(message, Data):
                self._data(peer, message)
            elif isinstance(message, Confirm):
                if message.key in self._open:
                    self._open[message.key].unconfirmed.discard(peer)
            elif isinstance(message, Refuse):
                self._refuse(peer, message)
            elif isinstance(message, Parcel):
                self.parcels.receive(peer, message)
            else:
                others.append(message)
        self._drains = [pair for pair in self._drains if not _over(pair[0])]
        return others

    def _data(self, peer: int, data: Data) -> None:
        if data.key in self._open:
            self._match(self._open[data.key], peer, data)
        elif (outcome := self._outcome(data.key)) is not None:
            self._stray(peer, data, outcome)
        else:
            self._early[data.key][peer] = data

    def look_around(self) -> None:
        """Find what peers show in their lanes and this rank does not expect."""
        suspects = set()
        for peer, data in self.channels.strays():
            posting, outcome = self._open.get(data.key), self._outcome(data.key)
            if posting is not None:
                if posting.form.difference(data) or peer not in posting.arrivals:
                    self._match(posting, peer, data)
            elif (
                outcome is not None and outcome.error is None and not self.channels.flying(data.key)
            ):
                suspects.add((peer, data.key))
                if (peer, data.key) in self._suspects:  # seen twice: nobody is taking it just now
                    self._stray(peer, data, outcome)
        self._suspects = suspects

    def _match(self, posting: Posting, peer: int, data: Data) -> None:
        arrival = posting.arrivals.get(peer)
        if arrival is None and posting.key.collective:
            problem = reason = (
                f"expected a form from rank {sorted(posting.sources)} alone, got one from rank "
                f"{peer}; give check=, or ASYNCDDP_CHECK, alike on all ranks"
            )
        elif arrival is None:
            problem = reason = (
                f"expected nothing from rank {peer}, got a tensor: {_neighbors(posting)}"
            )
        else:
            problem = posting.form.difference(data) or posting.row_difference(data) or ""
            reason = f"{problem} from rank {peer}"
        if problem:
            self._drain(peer, data)
            reason = f"rank {self.rank} {reason}"
            error = self._begun_here(f"{self._me(posting)}, peer rank {peer}: {problem}")
            posting.fail(error, reason)
            self.put(peer, Refuse(data.key, reason, origin=self.rank))
            return
        if arrival is not None:
            self._accept(posting, arrival.peer, data)

    def _accept(self, posting: Posting, peer: int, data: Data) -> None:
        arrival, dtype = posting.arrivals[peer], getattr(torch, data.dtype)
        begun = 0 if self.recorder is None else time.monotonic_ns()
        if data.lane is not None and posting.channel is not None:
            try:
                self.channels.watch(posting.channel, peer, data.lane)
            except OSError as error:
                problem = f"rank {self.rank} cannot map the memory of rank {peer}: {error}"
                posting.fail(self._begun_here(problem), problem)
        if data.tag == FORM:
            arrival.tensor = empty((0,), dtype)
        elif data.payload is not None:
            arrival.tensor = from_bytes(data.payload, dtype, data.shape)
        else:
            self._begin(posting, arrival, data)
        if self.recorder is not None and data.tag != FORM:
            facts = "receive", posting, peer, math.prod(data.shape) * dtype.itemsize
            arrival.transfer = noted(self.recorder, *facts, begun, arrival.transfer)
        ours_says_it = peer in posting.targets - posting.by_lane and not data.weights
        if data.confirm and not ours_says_it:
            self.put(peer, Confirm(data.key))
        if data.mutual and not posting.rows.get(peer):
            posting.unconfirmed.discard(peer)

    def _begin(self, posting: Posting, arrival: Arrival, data: Data) -> None:
        """Begin to receive a tensor, or to look at it."""
        wire, dtype = self._wire(posting.streams), getattr(torch, data.dtype)
        if posting.borrows and isinstance(wire, Lending):
            arrival.loan = wire.iborrow(data.shape, dtype, arrival.peer, data.tag)
            arrival.transfer = arrival.loan
            return
        arrival.tensor = empty_on(posting.streams, data.shape, dtype)
        arrival.transfer = wire.irecv(arrival.tensor, arrival.peer, data.tag)

    def _stray(self, peer: int, data: Data, outcome: _Outcome) -> None:
        """A tensor for an exchange that has ended here without it."""
        self._drain(peer, data)
        if outcome.error is not None:
            self.put(peer, self._refusal_of(data.key, outcome.error))
            return
        problem = (
            f"expected nothing from rank {peer} in {data.verb} {data.key}, got a tensor: "
            f"{_neighbors(outcome)}"
        )
        self._too_late(data.key, self._begun_here(f"rank {self.rank} {problem}"))
        self.put(peer, Refuse(data.key, f"rank {self.rank} {problem}", origin=self.rank))

    def _drain(self, peer: int, data: Data) -> None:
        """Take bulk bytes that nobody wants, so that their sender is not held up."""
        if data.payload is not None:
            return
        dtype = getattr(torch, data.dtype)
        wire = self._wire(None if data.device == "cpu" else _PLAIN)
        if isinstance(wire, Lending):
            loan = wire.iborrow(data.shape, dtype, peer, data.tag)
            loan.release()
            self._drains.append((loan, None))
            return
        scratch = empty(data.shape, dtype)
        self._drains.append((wire.irecv(scratch, peer, data.tag), scratch))

    def _refuse(self, peer: int, refusal: Refuse) -> None:
        outcome = self._outcome(refusal.key)
        if refusal.key in self._open:
            self._refusal(self._open[refusal.key], peer, refusal)
        elif outcome is None:
            self._refused[refusal.key] = (peer, refusal)
        elif outcome.error is None:
            self._too_late(refusal.key, self._heard(f"{refusal.key}", peer, refusal))

    def _too_late(self, key: Key, error: PeerError) -> None:
        """An exchange that had ended well was none; told once, by the next verb."""
        outcome = self._outcome(key)
        if outcome is not None:
            self._ended[key] = outcome._replace(error=error)
        for channel in self.channels.under(key.name):
            channel.error = error
        self.late = self.late or error

    def _refusal(self, posting: Posting, peer: int, refusal: Refuse) -> None:
        what = f"{posting.form.verb} {posting.key}"
        posting.fail(self._heard(what, peer, refusal), refusal.reason)

    def _heard(self, what: str, peer: int, refusal: Refuse) -> PeerError:
        """What a peer's refusal means here: an error of the kind that it met itself."""
        kind = _KINDS.get(refusal.kind, PeerError)
        did = "refused" if issubclass(kind, MismatchError) else "given up"
        error = kind(f"rank {self.rank}, {what}, {did} by rank {peer}: {refusal.reason}")
        error.origin = refusal.origin if refusal.origin >= 0 else peer
        return error

    def _begun_here(self, problem: str) -> MismatchError:
        """A contradiction that this rank has found."""
        error = MismatchError(problem)
        error.origin = self.rank
        return error

    def _refusal_of(self, key: Key, error: PeerError, reason: str = "") -> Refuse:
        """What peers are told of an exchange that has failed here."""
        origin = self.rank if error.origin is None else error.origin
        kind = type(error).__name__
        return Refuse(key, reason or str(error), kind if kind in _KINDS else "PeerError", origin)

    def _me(self, posting: Posting) -> str:
        return f"rank {self.rank}, {posting.form.verb} {posting.key}"


def _neighbors(exchange: Posting | _Outcome) -> str:
    return (
        f"it receives from {sorted(exchange.sources)} and sends to {sorted(exchange.targets)}; let "
        "the sender's dst_weights and the receiver's src_weights name each other"
    )
