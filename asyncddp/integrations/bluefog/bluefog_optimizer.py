"""BlueFog's functions that wrap an optimizer, and the wrapper with BlueFog's attributes."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from asyncddp.algorithms import ALGORITHMS, Algorithm
from asyncddp.context.user_activities import warn_timeline_off_once
from asyncddp.errors import ArgumentError
from asyncddp.integrations.bluefog.error_translation import translate_errors
from asyncddp.optim import DistributedOptimizer
from asyncddp.optim.distributed_optimizer_arguments import WeightOverrideDescriptor
from asyncddp.topology import GraphOrSchedule, TopologyError

__all__ = [
    "CommunicationType", "DistributedAdaptThenCombineOptimizer",
    "DistributedAdaptWithCombineOptimizer", "DistributedAllreduceOptimizer",
    "DistributedBluefogOptimizer", "DistributedGradientAllreduceOptimizer",
    "DistributedHierarchicalNeighborAllreduceOptimizer", "DistributedNeighborAllreduceOptimizer",
    "DistributedPullGetOptimizer", "DistributedPushSumOptimizer", "DistributedWinPutOptimizer",
]  # fmt: skip

logger = logging.getLogger("asyncddp")

Models = torch.nn.Module | Iterable[torch.nn.Module]


class CommunicationType(Enum):
    """BlueFog's enum of communication: with all ranks, neighbours, machines or nobody."""

    neighbor_allreduce = "neighbor.allreduce"
    hierarchical_neighbor_allreduce = "hierarchical.neighbor.allreduce"
    allreduce = "allreduce"
    empty = "empty"
    """No communication."""


class BluefogOptimizer(DistributedOptimizer):
    """Subclass of :class:`asyncddp.DistributedOptimizer` with BlueFog's attributes and methods.

    It counts as an instance of the wrapped optimizer's class, as BlueFog's do.

    Arguments are those of its base class; ``communication`` None is the algorithm's default.

    Attributes:
        enable_topo_check: Has no effect: senders and receivers are always checked.
        neighbor_weights, send_neighbors: Older names of ``src_weights`` and ``dst_weights``.
        unregister_window: BlueFog's name of :meth:`unregister_windows`.
    """

    enable_topo_check = False
    neighbor_weights = WeightOverrideDescriptor("src_weights")
    send_neighbors = WeightOverrideDescriptor("dst_weights")
    unregister_window = DistributedOptimizer.unregister_windows

    @translate_errors()
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: Models,
        algorithm: str,
        communication: CommunicationType | None = None,
        num_steps_per_communication: int = 1,
        window_prefix: str | None = None,
        max_staleness: int | None = None,
    ) -> None:
        self._warned = False
        super().__init__(
            optimizer,
            model,
            tolerant_algorithm(algorithm),
            None if communication is None else _checked(communication).name,
            num_steps_per_communication=num_steps_per_communication,
            window_prefix=window_prefix,
            max_staleness=max_staleness,
            scale_steps=False if algorithm == "push_sum" else None,  # as BlueFog's
            broadcast=False,
        )
        self.register_step_pre_hook(_warn_of_passes)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._wrapped) if self._initialized else type(self)

    @property
    def communication_type(self) -> CommunicationType:
        """Ranks with which parameters are averaged; may be set before any round, on all ranks."""
        if self.communication not in CommunicationType.__members__:
            raise ArgumentError(
                f"{self.algorithm} works through windows, by {self.communication}, and has no "
                "communication_type; its weights are set by dst_weights or src_weights"
            )
        return CommunicationType[self.communication]

    @communication_type.setter
    def communication_type(self, value: CommunicationType) -> None:
        self.communication = _checked(value).name

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Do nothing, for BlueFog's API: parameters are never averaged twice."""
        yield

    def register_step_function(self, function: Callable[..., None]) -> None:
        """Do nothing, for BlueFog's API: the wrapped optimizer's own step is always used."""

    def turn_on_timeline(self) -> None:
        """Trace steps, passes and updates from now on; log one error if the timeline is off."""
        if self._training_tracer.enabled is None:
            warn_timeline_off_once()
        else:
            self._training_tracer.enabled = True

    def turn_off_timeline(self) -> None:
        """Stop tracing steps, passes and updates; verbs are still traced."""
        if self._training_tracer.enabled is not None:
            self._training_tracer.enabled = False


def _checked(value: Any) -> CommunicationType:
    if not isinstance(value, CommunicationType):
        known = ", ".join(str(kind) for kind in CommunicationType)
        raise ArgumentError(f"argument communication_type: expected one of {known}, got {value!r}")
    return value


def _warn_of_passes(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Warn once if there are more backward passes before a step than configured."""
    phase, passes = optimizer._phase, optimizer._phase.accumulation
    too_many = passes.current_passes > passes.passes_per_round
    if too_many and phase.named_parameters and not optimizer._warned:
        optimizer._warned = True
        warnings.warn(
            f"Unexpected behavior: parameter {phase.named_parameters[0][0]} has got gradients of "
            f"{passes.current_passes} backward passes before step(), more than "
            f"num_steps_per_communication={passes.passes_per_round}. The ranks average in "
            "this step all the same; set it to the number of backward passes between two "
            "averagings, as the FAQ in docs/coming-from-bluefog.md says",
            stacklevel=4,
        )


class _GraphWarningAlgorithm(Algorithm):
    """Base class of algorithm variants that warn of an unsuitable graph instead of raising."""

    def check(self, graph_or_schedule: GraphOrSchedule) -> None:
        """Log a warning for a graph that the method's theory does not allow."""
        try:
            super().check(graph_or_schedule)
        except TopologyError as problem:
            logger.warning("%s. It runs all the same, as in BlueFog", problem)


@functools.cache
def tolerant_algorithm(name: str) -> type[Algorithm]:
    """Create the variant of a method, by its name, that accepts any graph."""
    method = ALGORITHMS[name]
    return type(method.__name__, (_GraphWarningAlgorithm, method), {"__doc__": method.__doc__})


_AWC, _ATC = "adapt_with_combine", "adapt_then_combine"
_PRESENT = "DistributedAdaptWithCombineOptimizer with communication_type=bf."
_NEAR = 0  # averagings; over there a put waits until its target is in MPI, which keeps ranks near


def DistributedGradientAllreduceOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Average all ranks' gradients; see :class:`BluefogOptimizer` for the arguments."""
    steps = num_steps_per_communication
    return BluefogOptimizer(optimizer, model, "gradient_allreduce", None, steps)


def DistributedAdaptWithCombineOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
) -> BluefogOptimizer:
    """Average parameters while the gradient is computed."""
    return BluefogOptimizer(optimizer, model, _AWC, communication_type, num_steps_per_communication)


def DistributedAdaptThenCombineOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
) -> BluefogOptimizer:
    """Make the optimizer's step, then average parameters."""
    return BluefogOptimizer(optimizer, model, _ATC, communication_type, num_steps_per_communication)


def DistributedWinPutOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
) -> BluefogOptimizer:
    """Put parameters into the neighbours' windows; wait only for neighbours that are behind."""
    steps = num_steps_per_communication
    return BluefogOptimizer(optimizer, model, "win_put", None, steps, window_prefix, _NEAR)


def DistributedPullGetOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Get parameters from the neighbours' windows; wait only for neighbours that are behind."""
    steps = num_steps_per_communication
    return BluefogOptimizer(optimizer, model, "pull_get", None, steps, None, _NEAR)


def DistributedPushSumOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Train by stochastic gradient push; ranks meet in each round if ``force_barrier`` is True."""
    made = BluefogOptimizer(optimizer, model, "push_sum", None, num_steps_per_communication)
    made.force_barrier = True
    return made


def DistributedBluefogOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Deprecated: the name of :func:`DistributedWinPutOptimizer` before BlueFog 0.3."""
    _deprecated("DistributedBluefogOptimizer", "DistributedWinPutOptimizer")
    return DistributedWinPutOptimizer(optimizer, model, num_steps_per_communication)


def DistributedAllreduceOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Deprecated: adapt-with-combine with all ranks."""
    kind = CommunicationType.allreduce
    _deprecated("DistributedAllreduceOptimizer", f"{_PRESENT}{kind}")
    return BluefogOptimizer(optimizer, model, _AWC, kind, num_steps_per_communication)


def DistributedNeighborAllreduceOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Deprecated: adapt-with-combine with the neighbours."""
    kind = CommunicationType.neighbor_allreduce
    _deprecated("DistributedNeighborAllreduceOptimizer", f"{_PRESENT}{kind}")
    return BluefogOptimizer(optimizer, model, _AWC, kind, num_steps_per_communication)


def DistributedHierarchicalNeighborAllreduceOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Deprecated: adapt-with-combine with the mean of each machine, between machines."""
    kind = CommunicationType.hierarchical_neighbor_allreduce
    _deprecated("DistributedHierarchicalNeighborAllreduceOptimizer", f"{_PRESENT}{kind}")
    return BluefogOptimizer(optimizer, model, _AWC, kind, num_steps_per_communication)


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(
        f"{name} is an older name: use {instead}", PendingDeprecationWarning, stacklevel=3
    )
