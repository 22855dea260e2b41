"""A message that NCCL is to carry: from when it was begun until the device is through with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncddp.errors import PeerError
from asyncddp.memory.allocate import empty
from asyncddp.memory.streams import Event
from asyncddp.transport.contract import Transfer
from asyncddp.transport.nccl_order import Offer

if TYPE_CHECKING:
    from asyncddp.transport.nccl_pair import Pair

__all__ = ["Message"]

_NOTHING = empty((0,), torch.uint8)


class Message:
    """A send or a receive between two ranks.

    It waits until the other side has its part as well, is entered by both, and ends on the device.

    Args:
        pair: Whose it is.
        offer: What it is.
        flat: Its bytes, on the device or, for a receive, anywhere.
        ready: What comes before it on the device.

    Attributes:
        event: Behind it on the device, once it is entered.
        staged: What carries it instead, where the pair has no communicator.
        problem: What has made an end of it.
        given_up: Whether nobody waits for it.
    """

    def __init__(self, pair: Pair, offer: Offer, flat: torch.Tensor, ready: Event) -> None:
        self._pair, self.offer, self.flat, self.ready = pair, offer, flat, ready
        self.event: Event | None = None
        self.staged: Transfer | None = None
        self.problem: PeerError | None = None
        self.given_up = False
        self._landed = False

    @property
    def over(self) -> bool:
        """Whether nothing is left to be done, well or not."""
        return self.problem is not None or self.landed()

    def landed(self) -> bool:
        """Whether the device is through with it."""
        if not self._landed and self.event is not None and self.event.done():
            self.land()
        return self._landed

    def land(self) -> None:
        """It has arrived; its tensor is let go."""
        self._landed, self.flat = True, _NOTHING

    def done(self) -> bool:
        """Whether it has arrived; moves all messages of the wire on."""
        self._pair.drive()
        if self.problem is not None:
            raise self.problem
        return self.landed() if self.staged is None else self.staged.done()

    def abandon(self) -> None:
        """Nobody waits for it any more.

        A send goes all the same, since its receiver counts on it. A receive is withdrawn unless
        both sides have entered it; then NCCL knows no other way than to abort the communicator.
        """
        again, self.given_up = self.given_up, True
        if self.staged is not None:
            self.staged.abandon()
        elif not (again or self.offer.sends or self.over):
            self._pair.withdraw(self)
