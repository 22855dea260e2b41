"""One exchange of one rank: whom it expects, what it expects, what has come. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from asyncddp.engine.messages import Data, Key
from asyncddp.errors import PeerError
from asyncddp.memory.streams import DeviceStreams
from asyncddp.transport.contract import Transfer
from asyncddp.transport.lending import Lent, Loan

if TYPE_CHECKING:
    from asyncddp.engine.channels import Channel

__all__ = ["Arrival", "Departure", "Form", "Freed", "Posting"]


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
            return f"expected shape {_tuple(self.shape)}, got {_tuple(data.shape)}"
        return None


def _tuple(shape: Iterable[int | None]) -> str:
    """A shape as Python writes it: ``(3,)``; with ``any`` where every size fits."""
    sizes = ["any" if size is None else str(size) for size in shape]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


class Arrival:
    """A tensor that is to come from one peer; done once it can be read.

    Attributes:
        tensor: Where it lies, or will.
        transfer: What brings it.
        loan: The same where it is read in the peer's memory.
    """

    def __init__(self, posting: Posting, peer: int) -> None:
        self.posting, self.peer = posting, peer
        self.tensor: torch.Tensor | None = None
        self.transfer: Transfer | None = None
        self.loan: Loan | None = None

    @property
    def heard(self) -> bool:
        """Whether the peer has announced it."""
        return self.tensor is not None or self.loan is not None

    def done(self) -> bool:
        """Whether the tensor is here."""
        self.posting.raise_if_failed()
        return self.heard and (self.transfer is None or self.transfer.done())

    def take(self) -> torch.Tensor:
        """The tensor, once done."""
        if self.loan is not None:
            return self.loan.tensor
        if self.tensor is None:
            raise RuntimeError("an arrival was taken before it was done")
        return self.tensor

    def release(self) -> None:
        """What reads the tensor is queued, or nobody will: the peer may write there again."""
        if self.loan is not None:
            self.loan.release()

    def missing(self) -> list[tuple[int, Key]]:
        """The peer, while nothing has come from it."""
        return [] if self.heard else [(self.peer, self.posting.key)]


class Posting:
    """One rank's side of one exchange.

    Args:
        key: Its name and step.
        form: What peers must agree about.
        sources: Ranks from which a tensor is expected.
        targets: Ranks to which one is sent.
        confirm: Ranks among ``targets`` whose confirmation is awaited.
        borrows: Whether what comes is read in the peers' memory where the wire offers that; each
            arrival is to be released then.

    Attributes:
        lent: What peers are shown by such a wire.
        by_lane: Targets that read what they need from this rank's lane.
        channel: The channel under whose name and form this is exchanged, if there is one.
        streams: Of the device on which the tensors lie; None on the host.
        row: This rank's row of W, where it is compared; and in ``rows`` what targets should have.
        audience: Ranks beyond sources and targets that are told where it fails.
    """

    def __init__(
        self,
        key: Key,
        form: Form,
        sources: Iterable[int],
        targets: Iterable[int],
        confirm: Iterable[int] = (),
        *,
        borrows: bool = False,
    ) -> None:
        self.key, self.form, self.borrows = key, form, borrows
        self.arrivals = {peer: Arrival(self, peer) for peer in sources}
        self.targets = frozenset(targets)
        self.unconfirmed = set(confirm)
        self.departures: list[Transfer] = []
        self.lent: list[Lent] = []
        self.by_lane: frozenset[int] = frozenset()
        self.channel: Channel | None = None
        self.streams: DeviceStreams | None = None
        self.row = ""
        self.rows: Mapping[int, str] = {}
        self.audience: frozenset[int] = frozenset()
        self.error: PeerError | None = None
        self.reason = ""

    def fail(self, error: PeerError, reason: str) -> None:
        """Fail this exchange, unless it has failed before.

        Args:
            error: What is wrong as seen from here.
            reason: The root of it, which the peers are told.
        """
        if self.error is None:
            self.error, self.reason = error, reason

    def raise_if_failed(self) -> None:
        """Raise what made this exchange fail, if something did."""
        if self.error is not None:
            raise self.error

    def row_difference(self, data: Data) -> str | None:
        """What does not fit about the weights that both sides know, or None."""
        if not self.row or not data.weights or data.weights == self.row:
            return None
        return (
            f"expected mixing weights {self.row}, got {data.weights} by the sender's topology; "
            "set the same topology, with the same weights, on all ranks"
        )

    @property
    def sources(self) -> frozenset[int]:
        """Ranks from which a tensor is expected."""
        return frozenset(self.arrivals)

    def peers(self) -> frozenset[int]:
        """Everybody who takes part, without this rank."""
        return self.sources | self.targets

    def freed(self) -> Freed:
        """Wait for this: what we have sent may be written again."""
        return Freed(self)

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


class Freed:
    """What a posting sends; done once that may be written, in the order of its device."""

    def __init__(self, posting: Posting) -> None:
        self.posting = posting

    def done(self) -> bool:
        """Whether peers have it, or read copies."""
        posting = self.posting
        posting.raise_if_failed()
        if not posting.lent:
            return posting.sent().done()
        return all([lent.free() for lent in posting.lent])

    def missing(self) -> list[tuple[int, Key]]:
        """The peers that have yet to take it."""
        return self.posting.sent().missing()
