"""Base class of training algorithms, which declare what ranks average, when, and how."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

import torch

from asyncddp.algorithms.topology_requirements import TopologyRequirements
from topology import GraphOrSchedule


class AveragedQuantity(Enum):
    """Kind of tensor that an algorithm averages: gradients or parameters."""

    GRADIENT = "gradient"
    PARAMETER = "parameter"


class CommunicationTiming(Enum):
    """Points of a training step at which averaging starts and its result is applied."""

    BEFORE_FORWARD = "before_forward"
    """Starts with the forward pass; the result is applied just before the optimizer's step."""
    GRADIENT_READY = "gradient_ready"
    """Starts as gradients become ready; applied at the end of the backward pass."""
    AFTER_STEP = "after_step"
    """Starts after the optimizer's step; applied before ``step()`` returns."""
    AFTER_BIASED_STEP = "after_biased_step"
    """As ``AFTER_STEP``, but the optimizer updates the parameters times the push-sum weight p."""
    THROUGH_STEP = "through_step"
    """Starts with the forward pass; the change by averaging is added after the step."""


class CommunicationPattern(Enum):
    """Communication pattern: which ranks average with each other, and whether they wait."""

    NEIGHBORS = "neighbors"
    MACHINES = "machines"
    GLOBAL = "global"
    PUT = "put"
    """Neighbours put tensors into each other's windows; no rank waits."""
    GET = "get"
    """Neighbours get tensors from each other's windows; no rank waits."""
    ACCUMULATE = "accumulate"
    """Each rank gives shares of its tensors to neighbours and collects theirs; no rank waits."""

    @property
    def one_sided(self) -> bool:
        """True if ranks communicate through one-sided windows, each at its own pace."""
        return self.value in ("put", "get", "accumulate")


class Algorithm:
    r"""Base class of training algorithms: declares what ranks average, when and how.

    A method is one class in one file and one line in the registry. The library moves tensors as
    the data says; the method knows nothing of models, optimizers, threads or transports. With W
    the mixing matrix of the round, the two hooks form

    .. math:: z_i = \mathrm{outgoing}(x_i), \qquad
              x_i \leftarrow \mathrm{incoming}\Big(x_i, \sum_j w_{ij} z_j\Big),

    where with one-sided communication the :math:`z_j` of neighbours are the latest that arrived.

    Other distributions add methods under the entry-point group ``asyncddp.algorithms``; the
    conformance tests run over the registry and hold each method to what it declares.

    Attributes:
        name: Name in the registry and the literature.
        what: Which tensors are averaged; parameters unless a method says otherwise.
        when: At which points of a step.
        how: Communication patterns that it allows; the first is the default.
        needs: Properties that the topology must have; others are refused.
        exact: Whether the ranks reach the optimum of the average loss with a constant step size
            though their data differ (with full gradients and a small enough step size); not
            unless a method says so.
        scales_steps: Whether updates are scaled, unless the user says otherwise, so that ranks of
            different speeds count equally; else the optimum is weighted by step rates.

    Example:
        >>> class Damped(Algorithm):
        ...     "Move halfway to the neighbours' average."
        ...
        ...     name, exact = "damped", False
        ...     when = CommunicationTiming.AFTER_STEP
        ...     how = (CommunicationPattern.NEIGHBORS,)
        ...     needs = TopologyRequirements(doubly_stochastic=True)
        ...
        ...     def incoming(self, flat, mixed):
        ...         flat.lerp_(mixed, 0.5)
    """

    name: ClassVar[str]
    what: ClassVar[AveragedQuantity] = AveragedQuantity.PARAMETER
    when: ClassVar[CommunicationTiming]
    how: ClassVar[tuple[CommunicationPattern, ...]]
    needs: ClassVar[TopologyRequirements] = TopologyRequirements()
    exact: ClassVar[bool] = False
    scales_steps: ClassVar[bool] = False

    @property
    def plain(self) -> bool:
        """True if neither hook is overridden, so that the average replaces the bucket."""
        own = type(self)
        return own.outgoing is Algorithm.outgoing and own.incoming is Algorithm.incoming

    def outgoing(self, flat: torch.Tensor) -> torch.Tensor:
        """Compute the tensor to send for a flat bucket, which stays unchanged until the result."""
        return flat

    def incoming(self, flat: torch.Tensor, mixed: torch.Tensor) -> None:
        """Write the average of the sent tensors into the flat bucket."""
        flat.copy_(mixed)

    def check(self, graph_or_schedule: GraphOrSchedule) -> None:
        """Raise an error for a graph or schedule on which this algorithm does not work.

        Raises:
            TopologyError: It does not fulfil ``needs``; the message says which requirement, and
                names a graph that does.
        """
        self.needs.check(self.name, graph_or_schedule)
