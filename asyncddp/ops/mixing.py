"""The arithmetic of one weighted average, and the exchange that feeds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncddp.engine import Desk, Steps
from asyncddp.memory.views import on_host
from asyncddp.ops.door import form_of

__all__ = ["Mixing", "exchange_and_mix"]


@dataclass(frozen=True)
class Mixing:
    """One rank's row of a mixing matrix, and what it sends.

    Attributes:
        self_weight: Weight of the own tensor.
        src_weights: Weight of each tensor received.
        dst_weights: Factor with which each tensor is sent.
    """

    self_weight: float
    src_weights: Mapping[int, float]
    dst_weights: Mapping[int, float]

    @property
    def uniform(self) -> bool:
        """Whether it is the plain mean, which is formed as a sum and one division."""
        share = 1.0 / (len(self.src_weights) + 1)
        weights = (self.self_weight, *self.src_weights.values())
        return all(math.isclose(weight, share, rel_tol=1e-12) for weight in weights)


def exchange_and_mix(
    desk: Desk, tensor: torch.Tensor, mixing: Mixing, dtype: torch.dtype
) -> Steps[torch.Tensor]:
    r"""Send a tensor, receive the neighbours', and give the weighted sum in ``dtype``.

    .. math:: y_i = w_{ii} x_i + \sum_j w_{ij} d_{ji} x_j

    Neighbours are added in ascending order, so that the result does not depend on who came first.
    """
    own = on_host(tensor)
    sources = sorted(mixing.src_weights)
    posting = desk.exchange(form_of(desk.verb, own), sources, mixing.dst_weights)
    for peer, factor in sorted(mixing.dst_weights.items()):
        desk.send(posting, peer, own if factor == 1.0 else own * factor)
    uniform = mixing.uniform
    total: torch.Tensor | None = None
    for peer in sources:
        yield posting.arrivals[peer]
        received = posting.arrivals[peer].take().to(dtype)
        weight = mixing.src_weights[peer]
        if total is not None:
            total.add_(received, alpha=1.0 if uniform else weight)
        elif len(sources) == 1 and math.isclose(mixing.self_weight + weight, 1.0, rel_tol=1e-12):
            total = torch.lerp(own.to(dtype), received, weight, out=received)
            uniform = False  # nothing is left to divide
        else:
            total = _begin(own.to(dtype), received, mixing.self_weight, weight, uniform=uniform)
    if total is None:
        total = own.to(dtype) * mixing.self_weight
    elif uniform:
        total /= len(sources) + 1
    yield posting.sent()
    return total


def _begin(
    own: torch.Tensor, received: torch.Tensor, self_weight: float, weight: float, *, uniform: bool
) -> torch.Tensor:
    """The first two terms, in the memory of the received one."""
    if uniform:
        return received.add_(own)
    return received.mul_(weight).add_(own, alpha=self_weight)
