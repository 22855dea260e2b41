"""Base class of Bagua's built-in algorithms, each of which runs one of asyncddp's algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from typing_extensions import override

from asyncddp.integrations.bagua.torch_api.algorithms.base import Algorithm
from asyncddp.integrations.bagua.torch_api.process_group import BaguaProcessGroup


@dataclass(frozen=True)
class LibraryMethod:
    """Algorithm of asyncddp, described by the arguments of ``DistributedOptimizer``.

    Attributes:
        name: Name of the method.
        arguments: Further arguments, and options of the method.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class LibraryAlgorithm(Algorithm):
    """Base class of Bagua's built-in algorithms, each of which runs one of asyncddp's algorithms.

    Its attributes are the algorithm's options, under Bagua's names.
    """

    method: ClassVar[str]
    """Name of the method."""

    @override
    def reify(self, process_group: BaguaProcessGroup) -> LibraryMethod:
        return LibraryMethod(self.method, self._arguments())

    def _arguments(self) -> dict[str, Any]:
        """Return the method's arguments for ``DistributedOptimizer``."""
        return dict(vars(self))

    def check_optimizers(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Raise an error if the algorithm cannot train the module with these optimizers."""

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"
