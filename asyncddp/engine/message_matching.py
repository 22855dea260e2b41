"""Message matching: pairs incoming messages with this rank's exchange requests, by name and step.

As in MPI there are two queues: posted requests that wait for messages, and unexpected messages that
wait for a request.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping

from asyncddp.engine.active_messages import ActiveMessageDispatcher
from asyncddp.engine.announced_tensor_receiver import AnnouncedTensorReceiver
from asyncddp.engine.exchange_request import (
    ExchangeRecord,
    ExchangeRequest,
    ExpectedMessage,
    contradiction,
    describe_neighbors,
)
from asyncddp.engine.messages import (
    COLLECTIVE,
    Ack,
    ActiveMessage,
    ExchangeSignature,
    MatchKey,
    Message,
    Nack,
    TensorMessage,
    decode,
    mismatch_found_by,
)
from asyncddp.engine.persistent_channels import PersistentChannelTable
from asyncddp.engine.send_queue import SendQueue
from asyncddp.engine.tracing import NO_TRACING, EngineTracing
from asyncddp.errors import IsolatedError, MismatchError, PeerError, PeerLeftError
from asyncddp.shm.collective_slots import CollectiveSlots
from asyncddp.transport.base import Transport

_MAX_FINISHED = 4096  # exchanges remembered after their end
_ACK_EVERY = 64  # uses of a name after which a sender waits for its receivers


class MessageMatcher:
    """Matcher of one rank: pairs incoming messages with its exchange requests, by name and step.

    Unexpected messages are kept until a request expects them. A message that contradicts a request
    fails the exchange on both sides. It is not thread-safe: the engine's lock guards it. ``uses``
    counts the uses of each name on this rank. ``refused`` holds refusals of exchanges that are not
    opened yet.
    """

    def __init__(
        self,
        transport: Transport,
        uses: Mapping[str, int] | None = None,
        tracing: EngineTracing = NO_TRACING,
        *,
        elastic: bool = False,
    ) -> None:
        self.rank, self.size, self.elastic = transport.rank, transport.size, elastic
        self.slots: dict[str, CollectiveSlots] = {}  # of collectives, by the name of their group
        if transport.collective_slots is not None:
            self.slots[COLLECTIVE] = transport.collective_slots
        records = transport.exit_records
        self._exit_records = {} if records is None else records
        self.channels = PersistentChannelTable(transport.ring_group, self.rank, tracing)
        self.sends = SendQueue(transport, self.channels)
        self._announced = AnnouncedTensorReceiver(self.rank, self.channels, self.sends)
        self.active_messages = ActiveMessageDispatcher(
            transport, self.sends, self._announced, self.channels
        )
        self._use_counts = {} if uses is None else uses
        self._suspects: set[tuple[int, MatchKey]] = set()  # unexpected when rings were last scanned
        self._posted: dict[MatchKey, ExchangeRequest] = {}
        self._finished: OrderedDict[MatchKey, ExchangeRecord] = OrderedDict()
        self._unexpected: dict[MatchKey, dict[int, TensorMessage]] = defaultdict(dict)
        self.refused: dict[MatchKey, tuple[int, Nack]] = {}
        self._acknowledged: set[tuple[int, ExchangeSignature]] = set()
        self.expected: dict[MatchKey, ExpectedMessage] = {}
        self._left: set[int] = set()  # peers of which nothing more can come

    def is_refused_at(self, name: str, step: int) -> bool:
        """Return whether a peer has refused an exchange that this rank has not opened yet."""
        return bool(self.refused) and MatchKey(name, step) in self.refused

    # exchanges

    def open(self, exchange: ExchangeRequest, *, check: bool) -> None:
        """Post an exchange request, and match it with messages that have arrived already.

        Targets that have never acknowledged its signature must acknowledge; in check mode all must.
        """
        key = exchange.key
        if key in self._posted:
            raise MismatchError(f"rank {self.rank}: {key} is under way already; wait for it first")
        check = check or key.step % _ACK_EVERY == 0
        exchange.unacknowledged = {
            peer
            for peer in exchange.targets - exchange.ring_targets
            if check
            or (peer, exchange.signature) not in self._acknowledged
            or self.channels.ring_to_offer(exchange.channel, peer) is not None
        }
        self._posted[key] = exchange
        if key in self.refused:
            self._fail_by_nack(exchange, *self.refused.pop(key))
        for peer, message in self._unexpected.pop(key, {}).items():
            self._match(exchange, peer, message)
        if self._left and exchange.tolerates_loss:
            for peer in self._left & (exchange.sources | exchange.targets):
                exchange.leave_out(peer)

    def leave_out(self, peer: int) -> None:
        """Let exchanges that tolerate it go on without a peer of which nothing more can come."""
        self._left.add(peer)
        self.channels.leave_out(peer)
        for exchange in self._posted.values():
            if exchange.tolerates_loss and peer in exchange.sources | exchange.targets:
                exchange.leave_out(peer)

    def readmit(self, peer: int | None = None) -> None:
        """Expect messages of a peer again, which has a new process; by default of all."""
        if peer is None:
            self._left.clear()
            return
        self._left.discard(peer)
        self._acknowledged = {one for one in self._acknowledged if one[0] != peer}
        self.channels.readmit(peer)

    def forget_rounds(self, peers: Collection[int], starts: Mapping[str, int]) -> None:
        """Discard messages of lost peers for rounds that are made without them."""
        for key, waiting in self._unexpected.items():
            if key.step >= starts.get(key.name, 0):
                for peer in waiting.keys() & peers:
                    self._announced.discard(peer, waiting.pop(peer))

    def post_short(
        self, key: MatchKey, signature: ExchangeSignature, peer: int, payload: bytes
    ) -> bool:
        """Send a short tensor in one message; False if that needs an exchange request."""
        if (
            key.step % _ACK_EVERY == 0
            or (peer, signature) not in self._acknowledged
            or key in self.refused
            or not self.sends.post_short(key, signature, peer, payload)
        ):
            return False
        self._remember(key, ExchangeRecord(frozenset(), frozenset((peer,)), None, signature))
        return True

    def expect(self, key: MatchKey, receive: ExpectedMessage) -> None:
        """Register a receive for the message of a key, which may have arrived already."""
        waiting = self._unexpected.get(key)
        self.expected[key] = receive
        if key in self.refused:
            receive.hand_over()
        elif waiting:
            peer, message = next(iter(waiting.items()))
            if self._give(receive, peer, message):
                del self._unexpected[key]

    def _give(self, receive: ExpectedMessage, peer: int, message: TensorMessage) -> bool:
        """Pass a message to its receive; False if the receive opened a request instead."""
        if not receive.receive(peer, message):
            return False
        key = message.key
        del self.expected[key]
        self._remember(key, ExchangeRecord(frozenset((peer,)), frozenset(), None))
        return True

    def _remember(self, key: MatchKey, finished: ExchangeRecord) -> None:
        self._finished[key] = finished
        if len(self._finished) > _MAX_FINISHED:
            self._finished.popitem(last=False)

    def close(self, exchange: ExchangeRequest, error: PeerError | None) -> None:
        """Remove an exchange request; if it failed, notify all participating ranks."""
        self._posted.pop(exchange.key, None)
        for receive in exchange.receives.values():
            receive.release()
        exchange.exports.clear()
        finished = ExchangeRecord(exchange.sources, exchange.targets, error, exchange.signature)
        self._remember(exchange.key, finished)
        if error is None:
            self._acknowledged.update((peer, exchange.signature) for peer in exchange.targets)
            if exchange.channel is not None and exchange.channel.send_ring is not None:
                reaches = exchange.channel.send_ring.reaches
                here = exchange.targets - exchange.left_out
                exchange.channel.readers.update(filter(reaches, here))
            return
        audience = exchange.audience
        quiet = self._is_quiet(error)
        if isinstance(error, PeerLeftError) and error.origin in self._exit_records:
            audience = frozenset()  # they find out by themselves
        told_all = bool(audience)
        nack = Nack.of(self.rank, exchange.key, error, exchange.reason, told_all=told_all)
        for peer in () if quiet else exchange.sources | exchange.targets | audience:
            self.sends.put(peer, nack)
        for receive in exchange.receives.values():
            self._announced.discard_receive(receive)
        for _, request in exchange.sends:
            request.abandon()

    def _is_quiet(self, error: PeerError) -> bool:
        """Tell whether other ranks find out by themselves, since runs go on without a lost rank."""
        return self.elastic and isinstance(error, PeerLeftError | IsolatedError)

    def has_submitted(self, key: MatchKey) -> bool:
        """Return whether this rank has submitted the operation of an exchange's key.

        Later exchanges of a submitted operation are made without the caller.
        """
        counts = self._use_counts
        return key.step < counts.get(key.name, counts.get(key.base, 0))

    def _finished_exchange(self, key: MatchKey) -> ExchangeRecord | None:
        partners = self.channels.partners(key)
        return self._finished.get(key) or (ExchangeRecord(*partners, None) if partners else None)

    def refuse_waiting_peer(self, peer: int, key: MatchKey) -> None:
        """Send a refusal to a peer that waits for this rank, if this rank's exchange omits it."""
        mine = self._posted.get(key) or self._finished_exchange(key)
        if mine is None or mine.error is not None or key.collective:
            return
        if peer not in mine.sources and peer not in mine.targets:
            problem = f"sends nothing to rank {peer}: {describe_neighbors(mine)}"
            self.sends.put(peer, Nack(key, f"rank {self.rank} {problem}", origin=self.rank))

    def is_announced(self, peer: int, key: MatchKey) -> bool:
        """Return whether a peer has announced a tensor that no request expects yet."""
        return peer in self._unexpected.get(key, ())

    def unexpected_from(self, peer: int) -> list[TensorMessage]:
        """Return a peer's messages that no request expects yet."""
        return [waiting[peer] for waiting in self._unexpected.values() if peer in waiting]

    # incoming messages

    def receive(self, peer: int, bundle: bytes) -> list[Message]:
        """Handle a bundle of messages; return the messages that do not concern exchanges."""
        others: list[Message] = []
        for message in decode(bundle):
            if isinstance(message, TensorMessage):
                self._receive_tensor(peer, message)
            elif isinstance(message, Ack):
                if message.key in self._posted:
                    self._posted[message.key].unacknowledged.discard(peer)
            elif isinstance(message, Nack):
                self._receive_nack(peer, message)
            elif isinstance(message, ActiveMessage):
                self.active_messages.receive(peer, message)
            else:
                others.append(message)
        self._announced.free_discards()
        return others

    def _receive_tensor(self, peer: int, message: TensorMessage) -> None:
        if message.key in self._posted:
            self._match(self._posted[message.key], peer, message)
        elif (finished := self._finished_exchange(message.key)) is not None:
            self._receive_late(peer, message, finished)
        else:
            expected = self.expected.get(message.key)
            if expected is None or not self._give(expected, peer, message):
                self._unexpected[message.key][peer] = message

    def scan_rings(self) -> None:
        """Find unexpected tensors in the peers' ring buffers, and fail their exchanges."""
        suspects = set()
        for peer, message in self.channels.unexpected_tensors():
            key = message.key
            if peer in self._left:
                continue
            exchange, finished = self._posted.get(key), self._finished_exchange(key)
            if exchange is not None:
                if exchange.signature.difference(message) or peer not in exchange.receives:
                    self._match(exchange, peer, message)
            elif finished and finished.error is None and not self.channels.is_in_flight(key):
                suspects.add((peer, key))
                if (peer, key) in self._suspects:  # found twice: nobody is reading it
                    self._receive_late(peer, message, finished)
        self._suspects = suspects

    def _match(self, exchange: ExchangeRequest, peer: int, message: TensorMessage) -> None:
        """Check a message against its request; accept it, or fail the exchange on both ranks."""
        problem, reason = contradiction(exchange, peer, message)
        if peer in self._left and peer not in exchange.receives:
            self._announced.discard(peer, message)
        elif problem is None:
            self._announced.accept(exchange, peer, message)
        else:
            self._announced.discard(peer, message)
            reason = f"rank {self.rank} {reason}"
            what = f"rank {self.rank}, {exchange.signature.verb} {exchange.key}"
            error = mismatch_found_by(self.rank, f"{what}, peer rank {peer}: {problem}")
            exchange.fail(error, reason)
            self.sends.put(peer, Nack(message.key, reason, origin=self.rank))

    def _receive_late(self, peer: int, message: TensorMessage, finished: ExchangeRecord) -> None:
        """Refuse a tensor for an exchange that has ended without it on this rank."""
        self._announced.discard(peer, message)
        if peer in self._left:
            return
        if finished.error is not None:
            if not self._is_quiet(finished.error):
                self.sends.put(peer, Nack.of(self.rank, message.key, finished.error))
            return
        form, problem = finished.signature, ""
        if message.key.collective and form is not None and (other := form.difference(message)):
            problem = f"rank {self.rank} {other} from rank {peer} in {message.key}"
        problem = problem or (
            f"rank {self.rank} expected nothing from rank {peer} in {message.verb} {message.key}, "
            f"got a tensor: {describe_neighbors(finished)}"
        )
        self._fail_finished(message.key, mismatch_found_by(self.rank, problem))
        self.sends.put(peer, Nack(message.key, problem, origin=self.rank))

    def _receive_nack(self, peer: int, nack: Nack) -> None:
        """Fail the exchange that a peer has refused, or keep the nack until it is opened."""
        finished = self._finished_exchange(nack.key)
        if nack.key.step < 0:  # of an active message
            what = f"message to {nack.key.name}"
            self.channels.fail_next_call(nack.to_error(self.rank, what, peer))
        elif nack.key in self._posted:
            self._fail_by_nack(self._posted[nack.key], peer, nack)
        elif finished is None:
            self.refused[nack.key] = (peer, nack)
            if nack.key in self.expected:
                self.expected[nack.key].hand_over()
        elif finished.error is None:
            self._fail_finished(nack.key, nack.to_error(self.rank, f"{nack.key}", peer))

    def _fail_finished(self, key: MatchKey, error: PeerError) -> None:
        """Fail an exchange that had ended without error; the next verb raises the error once."""
        finished = self._finished_exchange(key)
        if finished is not None:
            self._finished[key] = finished._replace(error=error)
        for channel in self.channels.find_all(key.name):
            channel.error = error
        self.channels.fail_next_call(error)

    def _fail_by_nack(self, exchange: ExchangeRequest, peer: int, nack: Nack) -> None:
        what = f"{exchange.signature.verb} {exchange.key}"
        exchange.fail(nack.to_error(self.rank, what, peer), nack.reason)
        if nack.told_all:
            exchange.audience = frozenset()
