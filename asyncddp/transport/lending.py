"""What a wire offers beside the contract where a peer can read a tensor in this rank's memory.

Everything here is in the order of a device's work, not of the host's: what counts as done is done
for whatever the queue WORK holds from then on. Nobody asks the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch

from asyncddp.transport.contract import Transfer

__all__ = ["Lending", "Lent", "Loan"]


class Lent(Transfer, Protocol):
    """A tensor that is shown to a peer; done once what reads it there is queued."""

    def free(self) -> bool:
        """Whether the tensor may be written again, though the peer may not have read it yet."""
        ...


class Loan(Transfer, Protocol):
    """A peer's tensor; done once what is queued on WORK may read it."""

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, once done; read before :meth:`release`, and never written."""
        ...

    def release(self) -> None:
        """What reads it is queued on WORK; harmless when called twice.

        Called early it means that nobody will read it: the peer is let go as soon as it comes.
        """
        ...


class Lending(ABC):
    """A wire on which tensors are read where they lie.

    What is sent by :meth:`ilend` is taken by ``irecv`` or :meth:`iborrow`, and what is sent by
    ``isend`` as well.
    """

    @abstractmethod
    def ilend(
        self,
        data: torch.Tensor,
        tags: Mapping[int, int],
        *,
        factor: float = 1.0,
        lasting: bool = False,
    ) -> dict[int, Lent]:
        """Show a tensor, or a multiple of it, to peers.

        Args:
            data: Contiguous.
            tags: The tag for each peer.
            factor: With which it is multiplied.
            lasting: Whether it stays as it is until all transfers are done; else a copy is shown.

        Returns:
            A transfer for each peer.
        """

    @abstractmethod
    def iborrow(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int) -> Loan:
        """Start to look at a peer's tensor."""
