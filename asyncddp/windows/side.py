"""Between the tensors of one rank and the memory of the host, in which its windows lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from asyncddp.memory.allocate import empty, empty_like
from asyncddp.windows.contract import Buffer, Outgoing
from asyncddp.windows.pool import Pool
from asyncddp.windows.sums import Term, weighted

__all__ = ["HostSide", "Publication", "Show", "Side", "Version"]

Version: TypeAlias = tuple[int, Outgoing, int]
"""A neighbour, the edge to it, and what it shall see there."""

Show: TypeAlias = Callable[[Buffer], Sequence[Version]]
"""Publishes a buffer along edges, under the window's lock; gives what has to travel."""


class Publication:
    """Something that is to be published.

    Attributes:
        versions: What has to travel, once it was published; None before that.
        problem: Why it cannot be published.
    """

    __slots__ = ("problem", "versions")

    def __init__(self, versions: Sequence[Version] | None = None) -> None:
        self.versions = versions
        self.problem: Exception | None = None


class Side(ABC):
    """Where the tensors of a window lie. The window's lock guards it.

    Args:
        pool: Buffers of the window.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @abstractmethod
    def publish(self, tensor: torch.Tensor, factor: float, show: Show) -> Publication:
        """Publish a tensor as it is for whoever calls, then multiply it by a factor."""

    @abstractmethod
    def then(self, act: Callable[[], Sequence[Version]]) -> Publication:
        """Do something after all that was published before."""

    @abstractmethod
    def mix(
        self,
        own: torch.Tensor,
        weight: float,
        terms: Sequence[Term],
        shares: int,
        *,
        clone: bool,
    ) -> torch.Tensor:
        r"""Form :math:`w_0 x + \sum_k w_k b_k`; arguments as of :func:`~.sums.weighted`.

        Args:
            own: x.
            weight: :math:`w_0`.
            terms: Tensors on the host, which are not needed afterwards, and their weights.
            shares: How many tensors are averaged.
            clone: Whether the sum is a new tensor, or replaces the own one.
        """

    @abstractmethod
    def bring(self, own: torch.Tensor, terms: Sequence[Term]) -> torch.Tensor:
        """A sum of tensors on the host, as a new one like the own tensor and where that lies."""

    @abstractmethod
    def keep_up(self) -> None:
        """Wait, without the window's lock, until not too much is under way.

        Raises:
            Exception: Something could not be published, whatever its handle said.
        """

    @abstractmethod
    def close(self) -> None:
        """Publish nothing any more."""


class HostSide(Side):
    """On the host: everything is done at once."""

    def publish(self, tensor: torch.Tensor, factor: float, show: Show) -> Publication:
        """Copy it into a buffer."""
        buffer = self._pool.room()
        values = tensor.detach() if tensor.requires_grad else tensor
        buffer.tensor.copy_(values)
        try:
            versions = show(buffer)
        finally:
            buffer.drop()
        if factor != 1.0:
            values.mul_(factor if tensor.is_floating_point() else int(factor))
        return Publication(versions)

    def then(self, act: Callable[[], Sequence[Version]]) -> Publication:
        """Now."""
        return Publication(act())

    def mix(
        self,
        own: torch.Tensor,
        weight: float,
        terms: Sequence[Term],
        shares: int,
        *,
        clone: bool,
    ) -> torch.Tensor:
        """In the own tensor where that is contiguous and on the host."""
        values = own.detach() if own.requires_grad else own
        direct = own.is_cpu and own.is_contiguous()
        here = values if direct else values.to("cpu").contiguous()
        out = empty_like(here) if clone or not direct else here
        weighted(out, [(here, weight), *terms], shares=shares)
        if clone:
            return out.to(own.device)
        if not direct:
            values.copy_(out)
        return own

    def bring(self, own: torch.Tensor, terms: Sequence[Term]) -> torch.Tensor:
        """Form it in new memory."""
        out = empty(own.shape, own.dtype)
        weighted(out, terms)
        return out.to(own.device)

    def keep_up(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is left to be published."""
