"""Methods as they are compared: name, settings, and momentum of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from asyncddp import simulate
from asyncddp.algorithms import ALGORITHMS, CommunicationPattern
from asyncddp.errors import ArgumentError
from asyncddp.topology import TopologyError
from asyncddp.topology.builders import TopologyLike

_RARELY = 5  # steps between averages, of methods that communicate rarely
_ASYNCHRONOUS = (CommunicationPattern.PUT, CommunicationPattern.GET, CommunicationPattern.PAIR)
_ALL = (CommunicationPattern.GLOBAL,)


@dataclass(frozen=True, eq=False)
class Contender:
    """A method with its settings.

    Attributes:
        title: As it stands in tables.
        name: The method's.
        settings: Of ``asyncddp.simulate.train``.
        momentum: Of SGD.
    """

    title: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    momentum: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether the method says that it has no bias where ranks' data differ."""
        return ALGORITHMS[self.name].exact

    @property
    def by_all_ranks(self) -> bool:
        """Whether it averages over all ranks, so that it asks for no graph."""
        return ALGORITHMS[self.name].how[0] in _ALL

    def train(
        self,
        problem: simulate.Problem,
        lr: float,
        graph: TopologyLike | None,
        *,
        steps: int,
        record_every: int | None = None,
        seed: int = 0,
        schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    ) -> simulate.Run | None:
        """Train by SGD; None where the method cannot live with the graph, or with SGD."""
        optimizer = partial(torch.optim.SGD, lr=lr, momentum=self.momentum)
        try:
            return simulate.train(
                problem,
                optimizer,
                self.name,
                steps=steps,
                record_every=record_every or steps,
                seed=seed,
                schedule=schedule,
                topology=graph,
                **self.settings,
            )
        except (ArgumentError, TopologyError):
            return None


def every_method() -> list[Contender]:
    """All methods of the registry, exact ones last; those whose ranks do not wait are left out."""
    found = [_with_defaults(name) for name in ALGORITHMS if _waits(name)]
    momentum = Contender("adapt_then_combine, momentum 0.9", "adapt_then_combine", momentum=0.9)
    return sorted([momentum, *found], key=lambda one: (one.exact, one.by_all_ranks, one.title))


def _waits(name: str) -> bool:
    method = ALGORITHMS[name]()  # with a bound it is another one where all ranks meet
    return method.how[0] not in _ASYNCHRONOUS and method.max_staleness is None


def _with_defaults(name: str) -> Contender:
    if ALGORITHMS[name].averages_first_step:
        return Contender(name, name)
    settings = {"communication_interval": _RARELY}
    return Contender(f"{name}, every {_RARELY} steps", name, settings)
