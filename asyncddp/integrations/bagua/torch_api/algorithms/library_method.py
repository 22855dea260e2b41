"""Base class of Bagua's own algorithms: each is a method of the library, with its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from asyncddp.algorithms import Algorithm as Method
from asyncddp.integrations.bagua.torch_api.algorithms.base import Algorithm
from asyncddp.integrations.bagua.torch_api.process_group import BaguaProcessGroup


@dataclass(frozen=True)
class LibraryMethod:
    """A method of the library, by the arguments of ``DistributedOptimizer``.

    Attributes:
        algorithm: Its name, or its class.
        arguments: Further arguments, and options of the method.
        averages_gradients: Whether all gradients are averaged, also those of no optimizer.
    """

    algorithm: str | type[Method]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    averages_gradients: bool = False


class LibraryAlgorithm(Algorithm):
    """Declaration of an algorithm that is a method of the library (base class)."""

    @override
    def reify(self, process_group: BaguaProcessGroup) -> LibraryMethod:
        raise NotImplementedError

    def check_optimizers(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
    ) -> None:
        """Raise an error for optimizers with which the algorithm cannot train the parameters."""

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


class SumOfRanks:
    """Mixin of methods that average gradients: gives the sum in place of the average.

    Args:
        ranks: Number of ranks.
        **options: Those of the method.
    """

    def __init__(self, *, ranks: int, **options: Any) -> None:
        super().__init__(**options)
        self.ranks = ranks

    def incoming(self, bucket: Any, received: Any) -> None:
        """Multiply the average by the number of ranks."""
        bucket.flat.copy_(received.mixed).mul_(self.ranks)
