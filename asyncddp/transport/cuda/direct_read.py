"""Interface of transports by which ranks read tensors directly in a peer's GPU memory.

Completion here is in the order of a device's streams, not of the host: a completed request holds
for all work that is queued on the COMPUTE stream from then on. The host never waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch

from asyncddp.transport.base import Request


class ExportRequest(Request, Protocol):
    """Request for a peer to read a tensor in place; complete once the peer has queued its reads."""

    def reusable(self) -> bool:
        """Return True once the tensor may be overwritten; the peer may not have read it yet."""
        ...


class ImportRequest(Request, Protocol):
    """Request to read a peer's tensor in place; complete once the compute stream may read it."""

    @property
    def tensor(self) -> torch.Tensor:
        """The peer's tensor, once complete; to be read before :meth:`release`, never written."""
        ...

    def release(self) -> None:
        """Tell the peer that all reads are queued on COMPUTE; harmless when called twice.

        Called before completion it means that the tensor will not be read: the peer's export is
        released as soon as it arrives.
        """
        ...


class DirectReadTransport(ABC):
    """Interface of a transport by which peers read a rank's GPU tensors in place.

    Both ``irecv`` and :meth:`import_tensor` receive what :meth:`export_tensor` or ``isend`` sends.
    """

    @abstractmethod
    def export_tensor(
        self,
        data: torch.Tensor,
        tags: Mapping[int, int],
        *,
        factor: float = 1.0,
        lasting: bool = False,
    ) -> dict[int, ExportRequest]:
        """Export a contiguous tensor, or its product with a factor, to peers, each under a tag.

        A ``lasting`` one stays unchanged until all requests are complete; of others a copy is
        exported.
        """

    @abstractmethod
    def import_tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int
    ) -> ImportRequest:
        """Start importing a peer's tensor."""
