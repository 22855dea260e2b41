"""Blocks: parameters that travel in one message, with the optimizer that updates them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch.autograd.graph import increment_version
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from asyncddp.errors import ArgumentError, UsageError
from asyncddp.memory.buckets import FlatBucket, Make, ParameterBucket

__all__ = ["Block", "CopiedBlock", "LRSchedulerFn", "Named", "OptimFn", "ViewBlock"]

Named: TypeAlias = Sequence[tuple[str, torch.nn.Parameter]]
OptimFn: TypeAlias = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
LRSchedulerFn: TypeAlias = Callable[[torch.optim.Optimizer], LRScheduler]


class Block(ABC):
    """Parameters that travel together, and the optimizer and scheduler that are theirs.

    Args:
        number: Which block of the model, from 0.
        named: Names and parameters of one dtype and device.

    Attributes:
        flat: What travels.
        optimizer, scheduler: Set by :meth:`equip`.
    """

    flat: torch.Tensor
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None

    def __init__(self, number: int, named: Named) -> None:
        self.number = number
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._versions: list[int] = []

    # values

    @abstractmethod
    def fill(self) -> None:
        """Bring the parameters' values into ``flat``.

        Raises:
            UsageError: A parameter was moved or cast.
        """

    @abstractmethod
    def spill(self) -> None:
        """Bring the values of ``flat`` into the parameters."""

    def strangers(self) -> list[int]:
        """Places of parameters that have left the block."""
        return []

    def take(self, mixed: torch.Tensor) -> None:
        """Give the parameters new values."""
        self.flat.copy_(mixed)
        self.spill()

    def remember(self) -> None:
        """From now on nobody but the block may change its parameters."""
        self._versions = [parameter._version for parameter in self.parameters]

    def insist_unchanged(self) -> None:
        """Refuse to go on where somebody has.

        Raises:
            UsageError: A parameter was changed.
        """
        changed = self.strangers()
        pairs = zip(self.parameters, self._versions, strict=True)
        changed += [place for place, (one, then) in enumerate(pairs) if one._version != then]
        if changed:
            raise UsageError(
                f"parameter {self.names[changed[0]]} was changed between two backward passes, "
                "while it was being averaged with the neighbours'; give parameters new values with "
                "load_state_dict() of the DecentralizedDataParallel, or use sync=False"
            )

    def _moved(self, name: str) -> UsageError:
        return UsageError(
            f"parameter {name} has another dtype, device, shape or memory format than in the first "
            "backward pass; move or cast the model before DecentralizedDataParallel gets it"
        )

    # updates

    def equip(self, optim_fn: OptimFn, lr_scheduler_fn: LRSchedulerFn | None) -> None:
        """Make the block's optimizer and scheduler.

        Raises:
            ArgumentError: What the user's functions give cannot be used.
        """
        made = optim_fn(list(zip(self.names, self.parameters, strict=True)))
        if not isinstance(made, torch.optim.Optimizer):
            raise ArgumentError(
                "argument optim_fn: expected a function that gives a torch.optim.Optimizer, got "
                f"{type(made).__name__} from it"
            )
        own = {id(parameter) for parameter in self.parameters}
        if any(id(parameter) not in own for g in made.param_groups for parameter in g["params"]):
            raise ArgumentError(
                "argument optim_fn: its optimizer holds parameters that it was not given; it is "
                "called once for each bucket, with the names and parameters of that bucket"
            )
        self.optimizer, self.scheduler = made, None
        if lr_scheduler_fn is not None:
            self.scheduler = _checked(lr_scheduler_fn(made))

    def step(self, *, update: bool) -> None:
        """End a step of the block: its gradients are gone, its scheduler has made a step.

        Args:
            update: Whether the optimizer uses the gradients before.
        """
        if update:
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        if self.scheduler is not None:
            if not update:  # what torch warns of, here on purpose
                self.optimizer._opt_called = True  # type: ignore[attr-defined]
            self.scheduler.step()


class ViewBlock(Block):
    """A block in which the parameters live: each one's ``data`` is a view of ``flat``.

    Args:
        number: As of every block.
        named: As of every block.
        make: Makes the memory of ``flat``, where it is special.
    """

    def __init__(self, number: int, named: Named, make: Make | None) -> None:
        super().__init__(number, named)
        self._bucket = ParameterBucket(named, make)
        self.flat = self._bucket.flat

    def fill(self) -> None:
        """The values are there; a parameter that has left is taken in again."""
        strangers = self.strangers()
        if strangers and not self._bucket.mend():
            raise self._moved(self.names[strangers[0]])

    def spill(self) -> None:
        """The values are there; autograd hears that they are new."""
        for parameter in self.parameters:
            increment_version(parameter)

    def strangers(self) -> list[int]:
        """Places of parameters that are no views any more."""
        return self._bucket.strangers()


class CopiedBlock(Block):
    """A block to and from which parameters are copied; they stay where they are.

    Args:
        number: As of every block.
        named: As of every block.
        make: As of :class:`ViewBlock`.
    """

    def __init__(self, number: int, named: Named, make: Make | None) -> None:
        super().__init__(number, named)
        self._bucket = FlatBucket([parameter.data for parameter in self.parameters], make=make)
        self.flat = self._bucket.flat

    def fill(self) -> None:
        """Copy the values in."""
        places = zip(self.names, self.parameters, self._bucket.views, strict=True)
        for name, one, view in places:
            if (one.dtype, one.device, one.shape) != (view.dtype, view.device, view.shape):
                raise self._moved(name)
            view.copy_(one.data)

    def spill(self) -> None:
        """Copy the values out."""
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self._bucket.views, strict=True):
                parameter.copy_(view)


def _checked(scheduler: object) -> LRScheduler:
    if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
        return scheduler
    raise ArgumentError(
        "argument lr_scheduler_fn: expected a function that gives a "
        "torch.optim.lr_scheduler.LRScheduler whose step() needs no argument, got "
        f"{type(scheduler).__name__} from it"
    )
