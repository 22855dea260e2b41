"""One exchange of one rank: whom it expects, what it expects, what has come. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from asyncddp.engine.messages import Data, Key
from asyncddp.errors import MismatchError, PeerError
from asyncddp.memory.streams import DeviceStreams
from asyncddp.transport.contract import Transfer

if TYPE_CHECKING:
    from asyncddp.engine.channels import Channel

__all__ = ["Arrival", "Departure", "Form", "Posting"]


@dataclass(frozen=True)
class Form:
    """What both sides of an exchange must agree about.

    Attributes:
        verb: The verb's name.
        dtype: Short name of the dtype.
        shape: The shape; None in place of a size that may differ between ranks.
        device: The kind of device.
    """

    verb: str
    dtype: str
    shape: tuple[int | None, ...]
    device: str = "cpu"

    def difference(self, data: Data) -> str | None:
        """What does not fit about a message, as "expected …, got …", or None."""
        if data.verb != self.verb:
            return f"expected verb {self.verb}, got {data.verb}"
        if data.dtype != self.dtype:
            return f"expected dtype {self.dtype}, got {data.dtype}"
        if data.device != self.device:
            return f"expected a tensor on {self.device}, got one on {data.device}"
        fits = len(data.shape) == len(self.shape) and all(
            want is None or want == have for want, have in zip(self.shape, data.shape, strict=True)
        )
        if not fits:
            expected = "(" + ", ".join("any" if s is None else str(s) for s in self.shape) + ")"
            return f"expected shape {expected}, got ({', '.join(map(str, data.shape))})"
        return None


class Arrival:
    """A tensor that is to come from one peer; done once it lies in memory."""

    def __init__(self, posting: Posting, peer: int) -> None:
        self.posting, self.peer = posting, peer
        self.tensor: torch.Tensor | None = None
        self.transfer: Transfer | None = None

    def done(self) -> bool:
        """Whether the tensor is here."""
        self.posting.raise_if_failed()
        return self.tensor is not None and (self.transfer is None or self.transfer.done())

    def take(self) -> torch.Tensor:
        """The tensor, once done."""
        if self.tensor is None:
            raise RuntimeError("an arrival was taken before it was done")
        return self.tensor

    def missing(self) -> list[tuple[int, Key]]:
        """The peer, while nothing has come from it."""
        return [] if self.tensor is not None else [(self.peer, self.posting.key)]


class Posting:
    """One rank's side of one exchange.

    Args:
        key: Its name and step.
        form: What peers must agree about.
        sources: Ranks from which a tensor is expected.
        targets: Ranks to which one is sent.
        confirm: Ranks among ``targets`` whose confirmation is awaited.

    Attributes:
        by_lane: Targets that read what they need from this rank's lane.
        channel: The channel under whose name and form this is exchanged, if there is one.
        streams: Of the device on which the tensors lie; None on the host.
    """

    def __init__(
        self,
        key: Key,
        form: Form,
        sources: Iterable[int],
        targets: Iterable[int],
        confirm: Iterable[int] = (),
    ) -> None:
        self.key, self.form = key, form
        self.arrivals = {peer: Arrival(self, peer) for peer in sources}
        self.targets = frozenset(targets)
        self.unconfirmed = set(confirm)
        self.departures: list[Transfer] = []
        self.by_lane: frozenset[int] = frozenset()
        self.channel: Channel | None = None
        self.streams: DeviceStreams | None = None
        self.error: PeerError | None = None
        self.reason = ""

    def fail(self, what: str, reason: str) -> None:
        """Fail this exchange, unless it has failed before.

        Args:
            what: What is wrong as seen from here.
            reason: The root of it, which the peers are told.
        """
        if self.error is None:
            self.error, self.reason = MismatchError(what), reason

    def raise_if_failed(self) -> None:
        """Raise what made this exchange fail, if something did."""
        if self.error is not None:
            raise self.error

    @property
    def sources(self) -> frozenset[int]:
        """Ranks from which a tensor is expected."""
        return frozenset(self.arrivals)

    def peers(self) -> frozenset[int]:
        """Everybody who takes part, without this rank."""
        return self.sources | self.targets

    def sent(self) -> Departure:
        """Wait for this: our tensors have left, and those that were asked have confirmed."""
        return Departure(self)


class Departure:
    """What a posting sends; done once it has left and been confirmed where that was asked."""

    def __init__(self, posting: Posting) -> None:
        self.posting = posting

    def done(self) -> bool:
        """Whether our buffers are free again and nobody has yet to confirm."""
        posting = self.posting
        posting.raise_if_failed()
        if posting.departures and all([transfer.done() for transfer in posting.departures]):
            posting.departures.clear()
        return not posting.departures and not posting.unconfirmed

    def missing(self) -> list[tuple[int, Key]]:
        """The peers that have yet to confirm, or to take what was sent."""
        peers = self.posting.unconfirmed or (
            self.posting.targets if self.posting.departures else ()
        )
        return [(peer, self.posting.key) for peer in sorted(peers)]
