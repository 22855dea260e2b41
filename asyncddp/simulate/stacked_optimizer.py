"""The user's optimizer on the stacked models: one for all ranks, or one per rank."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch.optim.lr_scheduler import LRScheduler

from asyncddp.errors import ArgumentError
from asyncddp.optim.fused_optimizer import ELEMENTWISE
from asyncddp.registry import nearest
from asyncddp.simulate.stacked_model import StackedModel

OptimizerFactory: TypeAlias = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory: TypeAlias = Callable[[torch.optim.Optimizer], LRScheduler]


def optimizer_named(name: str, **options: Any) -> OptimizerFactory:
    """Return a function that creates the ``torch.optim`` optimizer of the given name.

    Args:
        name: Such as ``"SGD"`` or ``"AdamW"``.
        **options: Its keyword arguments; those that it does not have are errors.

    Raises:
        ArgumentError: There is none of that name, or it has no such option.
    """
    known = {key: one for key, one in vars(torch.optim).items() if isinstance(one, type)}
    del known["Optimizer"]
    kind = known.get(name)
    if kind is None:
        raise ArgumentError(
            f"argument optimizer: torch.optim has no {name!r}; it has {', '.join(sorted(known))}."
            f"{nearest(name, known)}"
        )
    for option in options:
        if option not in inspect.signature(kind).parameters:
            raise ArgumentError(f"argument {option}: torch.optim.{name} has no such option")

    def create(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = kind(parameters, **options)
        except ValueError as error:
            raise ArgumentError(f"argument optimizer: torch.optim.{name}: {error}") from error
        return made

    return create


class StackedOptimizer:
    """Optimizer of all ranks' parameters: one for all ranks, or one per rank.

    An elementwise optimizer updates the stacked parameters of all ranks at once. For any other,
    such as Adafactor or a user's optimizer, each rank has an optimizer of its own for its rows.

    Args:
        model: The models.
        create: Makes the optimizer of one model from its parameters, in the model's order.
        schedule: Makes a scheduler of the learning rate; None for none.
        by_rank: Whether each rank has its own in any case, since ranks step at their own time.

    Attributes:
        elementwise: Whether there is one for all.
        each: The optimizers: one for all, or one a rank.
        schedulers: A scheduler of each, where there are any.
        groups: An optimizer, or what looks like one, whose groups hold the stacked parameters.

    Raises:
        ArgumentError: The optimizer needs a closure, which evaluates one model several times.
    """

    def __init__(
        self,
        model: StackedModel,
        create: OptimizerFactory,
        schedule: SchedulerFactory | None = None,
        *,
        by_rank: bool = False,
    ) -> None:
        self._names = list(model.parameters)
        self._stacked = list(model.parameters.values())
        first = create(rows := self._rows(0))
        self.elementwise = type(first) in ELEMENTWISE and not by_rank
        self._rank_rows: list[list[torch.nn.Parameter]] = []
        if self.elementwise:
            self.each = [create(self._stacked)]
            self.groups = self.each[0]
        else:
            _refuse_closures(first)
            self._rank_rows = [rows, *(self._rows(rank) for rank in range(1, model.ranks))]
            self.each = [first, *(create(rows) for rows in self._rank_rows[1:])]
            stacked = _StackedGroups(self.each, self._rank_rows, self._stacked)
            self.groups = cast("torch.optim.Optimizer", stacked)
        self.schedulers = [] if schedule is None else [schedule(one) for one in self.each]

    def _rows(self, rank: int) -> list[torch.nn.Parameter]:
        """Return one rank's parameters as views of the stacked parameters."""
        return [torch.nn.Parameter(one.detach()[rank]) for one in self._stacked]

    def step(self) -> None:
        """Update all ranks with their gradients."""
        for rank, rows in enumerate(self._rank_rows):
            for row, stacked in zip(rows, self._stacked, strict=True):
                row.grad = None if stacked.grad is None else stacked.grad[rank]
        for optimizer in self.each:
            optimizer.step()

    # where each rank has its own

    def rows_of(self, rank: int, names: Iterable[str]) -> list[torch.Tensor]:
        """Return the named parameters of one rank as views of the stacked parameters."""
        rows = dict(zip(self._names, self._rank_rows[rank], strict=True))
        return [rows[name] for name in names]

    def set_gradients(self, rank: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Set the gradients of one rank, by parameter name."""
        for name, row in zip(self._names, self._rank_rows[rank], strict=True):
            row.grad = gradients[name]

    def admit(self, sponsors: Mapping[int, int]) -> None:
        """Give each rank that arrives the state of its sponsor."""
        if not self.elementwise:
            for kept in (self.each, self.schedulers):
                for rank, sponsor in sponsors.items() if kept else ():
                    kept[rank].load_state_dict(copy.deepcopy(kept[sponsor].state_dict()))
            return
        new, given = list(sponsors), list(sponsors.values())
        for parameter, state in self.each[0].state.items():
            for kept in state.values():
                if isinstance(kept, torch.Tensor) and kept.shape == parameter.shape:
                    kept[new] = kept[given]

    def end_step(self) -> None:
        """Step the learning rate schedulers."""
        for scheduler in self.schedulers:
            scheduler.step()


class _StackedGroups:
    """Parameter groups and state of all ranks' optimizers, presented with stacked parameters."""

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        rank_rows: list[list[torch.nn.Parameter]],
        stacked: list[torch.nn.Parameter],
    ) -> None:
        self._optimizers, self.defaults = optimizers, optimizers[0].defaults
        self._stacked, self._rows = stacked, list(zip(*rank_rows, strict=True))
        self._stacked_of = {id(row): one for row, one in zip(rank_rows[0], stacked, strict=True)}

    @property
    def state(self) -> dict[torch.nn.Parameter, _StackedState]:
        """State of the ranks' optimizers by stacked parameter, available after a step."""
        return {
            one: _StackedState(
                [own.state[row] for own, row in zip(self._optimizers, rows, strict=True)]
            )
            for one, rows in zip(self._stacked, self._rows, strict=True)
            if rows[0] in self._optimizers[0].state
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups with their current options."""
        return [
            {**group, "params": [self._stacked_of[id(row)] for row in group["params"]]}
            for group in self._optimizers[0].param_groups
        ]


class _StackedState:
    """State of the ranks' optimizers for one parameter, by name."""

    def __init__(self, each: list[dict[str, Any]]) -> None:
        self._each = each

    def get(self, key: str) -> Any:
        """Return the ranks' tensors stacked; they become views of the stacked tensor.

        Values that are no tensors, or differ in shape between ranks, are the first rank's.
        """
        kept = [own.get(key) for own in self._each]
        tensors = [one for one in kept if isinstance(one, torch.Tensor)]
        if len(tensors) < len(kept) or len({one.shape for one in tensors}) > 1:
            return kept[0]
        stacked = torch.stack(tensors)
        for own, row in zip(self._each, stacked, strict=True):
            own[key] = row
        return stacked


def _refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ArgumentError(
            f"argument optimizer: {type(optimizer).__name__} evaluates the model several times in "
            "a step, each rank as often as it likes, which a simulation of all ranks at once "
            "cannot; expected an optimizer whose step() needs no closure, such as torch.optim.SGD"
        )
