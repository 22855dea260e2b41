"""Parameter buckets, each sent as one message and updated by its own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch.autograd.graph import increment_version
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from asyncddp.errors import ArgumentError, UsageError
from asyncddp.tensors.buckets import NamedFlatBucket, ParameterBucket, TensorFactory, partition
from asyncddp.tensors.local_parts import local

NamedParameters: TypeAlias = Sequence[tuple[str, torch.nn.Parameter]]
OptimFn: TypeAlias = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
LRSchedulerFn: TypeAlias = Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass(frozen=True)
class BucketUpdateConfig:
    """Settings of buckets with own optimizers: optimizer factory, grad scaler, clipping, size."""

    optim_fn: OptimFn
    lr_scheduler_fn: LRSchedulerFn | None
    scaler: torch.amp.GradScaler | None
    grad_clip_norm: float
    """Maximum norm of all gradients together; 0 for no limit."""
    bucket_bytes: int
    as_view: bool
    """True if parameters are views in the buckets."""

    @property
    def updates_together(self) -> bool:
        """True if updates need the gradients of all buckets."""
        return self.scaler is not None or self.grad_clip_norm > 0


class OptimizedParameters:
    """Group of parameters with its own optimizer and learning-rate scheduler.

    Attributes:
        optimizer, scheduler: Set by :meth:`create_optimizer`.
    """

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None

    def __init__(self, named: NamedParameters) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]

    def create_optimizer(self, optim_fn: OptimFn, lr_scheduler_fn: LRSchedulerFn | None) -> None:
        """Create the optimizer and the scheduler by the given functions."""
        optimizer = optim_fn(list(zip(self.names, self.parameters, strict=True)))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentError(
                "argument optim_fn: expected a function that gives a torch.optim.Optimizer, got "
                f"{type(optimizer).__name__} from it"
            )
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not held.issubset(map(id, self.parameters)):
            raise ArgumentError(
                "argument optim_fn: its optimizer holds parameters that it was not given; it is "
                "called once for each bucket, with the names and parameters of that bucket"
            )
        self.optimizer, self.scheduler = optimizer, None
        if lr_scheduler_fn is not None:
            self.scheduler = _checked(lr_scheduler_fn(optimizer))

    def step(self, *, update: bool) -> None:
        """Step the optimizer, if ``update``, and the scheduler; then drop the gradients."""
        if update:
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        if self.scheduler is not None:
            if not update:  # what torch warns of, here on purpose
                self.optimizer._opt_called = True  # type: ignore[attr-defined]
            self.scheduler.step()


class OptimizerBucket(OptimizedParameters):
    """Bucket of parameters sent in one message, with its own optimizer and scheduler.

    Attributes:
        index: Index of the bucket.
        members: Indices of its parameters in the model.
        flat: The flat tensor that is sent; parameters are views in it or copied from and to it.
        layout: Layout of the parameters in it.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[int],
        named: NamedParameters,
        make: TensorFactory | None,
        *,
        as_view: bool,
    ) -> None:
        super().__init__(named)
        self.index, self.members = index, members
        self._storage = ParameterBucket(named, make) if as_view else None
        self.layout = self._storage or NamedFlatBucket(named, make=make)
        self.flat = self.layout.flat
        self._versions: list[int] = []

    def pack(self) -> None:
        """Write the parameters' values to ``flat``; reattach parameters that are not views."""
        if self._storage is not None:
            detached = self._storage.detached_indices()
            if detached and not self._storage.reattach():
                raise self._moved_error(self.names[detached[0]])
            self._storage.read()
            return
        parts = map(local, self.parameters)
        for name, one, view in zip(self.names, parts, self.layout.views, strict=True):
            if (one.dtype, one.device, one.shape) != (view.dtype, view.device, view.shape):
                raise self._moved_error(name)
            view.copy_(one)

    def unpack(self) -> None:
        """Write the values of ``flat`` to the parameters, and increment their version counters."""
        if self._storage is not None:
            self._storage.write()
            for parameter in self.parameters:
                increment_version(parameter)
            return
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self.layout.views, strict=True):
                local(parameter).copy_(view)
                increment_version(parameter)

    def record_versions(self) -> None:
        """Record the parameters' version counters, for :meth:`check_unchanged`."""
        self._versions = [parameter._version for parameter in self.parameters]

    def check_unchanged(self) -> None:
        """Raise an error if a parameter has changed since its version was recorded."""
        changed = [] if self._storage is None else self._storage.detached_indices()
        pairs = zip(self.parameters, self._versions, strict=True)
        changed += [position for position, (one, then) in enumerate(pairs) if one._version != then]
        if changed:
            raise UsageError(
                f"parameter {self.names[changed[0]]} was changed between two backward passes, "
                "while it was being averaged with the neighbours'; give parameters new values with "
                "load_state_dict() of the DecentralizedDataParallel, or use sync=False"
            )

    def _moved_error(self, name: str) -> UsageError:
        return UsageError(
            f"parameter {name} has another dtype, device, shape or memory format than in the first "
            "backward pass; move or cast the model before DecentralizedDataParallel gets it"
        )


class TrainingObserver(Protocol):
    """Interface of observers of a model's updates and steps, such as a monitor."""

    def before_update(self, bucket: OptimizedParameters) -> None:
        """Handle a bucket's gradients, just before its optimizer uses them."""

    def after_step(self) -> None:
        """Handle the end of a step."""


def _checked(scheduler: object) -> LRScheduler:
    if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
        return scheduler
    raise ArgumentError(
        "argument lr_scheduler_fn: expected a function that gives a "
        "torch.optim.lr_scheduler.LRScheduler whose step() needs no argument, got "
        f"{type(scheduler).__name__} from it"
    )


def build_buckets(
    named: NamedParameters,
    parts: Sequence[Sequence[int]],
    config: BucketUpdateConfig,
    make: TensorFactory | None,
    kinds: Sequence[int],
) -> list[OptimizerBucket]:
    """Create buckets with their optimizers, in order; none mixes parts or kinds of parameters."""
    built: list[OptimizerBucket] = []
    for part in parts:
        parameters, of_part = [named[index][1] for index in part], [kinds[index] for index in part]
        for positions in partition(parameters, config.bucket_bytes, kinds=of_part):
            members = [part[position] for position in positions]
            own = [named[index] for index in members]
            with torch.no_grad():
                bucket = OptimizerBucket(len(built), members, own, make, as_view=config.as_view)
            bucket.create_optimizer(config.optim_fn, config.lr_scheduler_fn)
            built.append(bucket)
    return built


def describe_ready_order(counts: Mapping[int, int], names: Sequence[str]) -> list[str]:
    """Describe order and number of the parameters' gradients as texts, which ranks compare.

    Example:
        >>> describe_ready_order({0: 1, 2: 2}, ["a", "b", "c"])[1:]
        ['the 2nd gradient of all for c, which got 2', 'no gradient for b']
    """
    found = []
    for position, (parameter, times) in enumerate(counts.items(), start=1):
        teen = position % 100 in (11, 12, 13)
        ending = "th" if teen else {1: "st", 2: "nd", 3: "rd"}.get(position % 10, "th")
        more = f", which got {times}" if times > 1 else ""
        found.append(f"the {position}{ending} gradient of all for {names[parameter]}{more}")
    return found + [f"no gradient for {name}" for i, name in enumerate(names) if i not in counts]
