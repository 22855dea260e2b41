"""What a method is: data that says what is averaged, when and how, and two small hooks."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

import torch

from asyncddp.algorithms.needs import Needs
from topology import GraphOrSchedule

__all__ = ["Algorithm", "How", "What", "When"]


class What(Enum):
    """What is sent."""

    GRADIENT = "gradient"
    PARAMETER = "parameter"


class When(Enum):
    """When it is sent, and when the result is taken."""

    BEFORE_FORWARD = "before_forward"
    """Sent as the forward pass starts, taken just before the optimizer's step."""
    GRADIENT_READY = "gradient_ready"
    """Sent as gradients get ready, taken at the end of the backward pass."""
    AFTER_STEP = "after_step"
    """Sent after the optimizer's step, taken before ``step()`` returns."""
    AFTER_BIASED_STEP = "after_biased_step"
    """The same, where the optimizer steps on the parameters times the p of push-sum."""
    THROUGH_STEP = "through_step"
    """Sent as the forward pass starts; after the optimizer's step, what it has changed is added."""


class How(Enum):
    """Among whom it is averaged, and who waits."""

    NEIGHBORS = "neighbors"
    MACHINES = "machines"
    GLOBAL = "global"
    PUT = "put"
    """Neighbours put it into each other's windows; nobody waits."""
    GET = "get"
    """Neighbours get it from each other's windows; nobody waits."""
    ACCUMULATE = "accumulate"
    """Each gives shares of what it has away, and collects those of others; nobody waits."""

    @property
    def one_sided(self) -> bool:
        """Whether ranks take part at their own pace, through windows."""
        return self in (How.PUT, How.GET, How.ACCUMULATE)


class Algorithm:
    r"""A method: one class in one file, and one line in the registry.

    The library moves tensors as the data says; the method knows nothing of models, optimizers,
    threads or wires. With W the mixing matrix of the round, the two hooks form

    .. math:: z_i = \mathrm{outgoing}(x_i), \qquad
              x_i \leftarrow \mathrm{incoming}\Big(x_i, \sum_j w_{ij} z_j\Big),

    where with one-sided communication the :math:`z_j` of neighbours are those that have come last.

    Other distributions add methods under the entry-point group ``asyncddp.algorithms``; the
    conformance tests run over the registry and hold each method to what it declares.

    Attributes:
        name: As in the registry and the literature.
        what: What is sent.
        when: When.
        how: Among whom it may be averaged; the first is the default.
        needs: What the theory asks of the graph. One that does not fit is refused.
        exact: Whether the ranks reach the optimum of the average loss with a constant step size
            though each has other data (full gradients, and a step size that is small enough).
        scales_steps: Whether updates are scaled, unless the user says otherwise, so that ranks of
            different speed count alike; else the optimum is weighted by how often ranks step.

    Example:
        >>> class Damped(Algorithm):
        ...     "Go half of the way to the neighbours' average."
        ...
        ...     name, what, when = "damped", What.PARAMETER, When.AFTER_STEP
        ...     how, needs, exact = (How.NEIGHBORS,), Needs(doubly_stochastic=True), False
        ...
        ...     def incoming(self, flat, mixed):
        ...         flat.lerp_(mixed, 0.5)
    """

    name: ClassVar[str]
    what: ClassVar[What]
    when: ClassVar[When]
    how: ClassVar[tuple[How, ...]]
    needs: ClassVar[Needs] = Needs()
    exact: ClassVar[bool]
    scales_steps: ClassVar[bool] = False

    @property
    def plain(self) -> bool:
        """Whether the average of the buckets takes their place, and no hook adds to that."""
        mine = type(self)
        return mine.outgoing is Algorithm.outgoing and mine.incoming is Algorithm.incoming

    def outgoing(self, flat: torch.Tensor) -> torch.Tensor:
        """What is sent of a flat bucket, which is left as it is until the result is taken."""
        return flat

    def incoming(self, flat: torch.Tensor, mixed: torch.Tensor) -> None:
        """Put the average of what was sent into the flat bucket."""
        flat.copy_(mixed)

    def check(self, graph_or_schedule: GraphOrSchedule) -> None:
        """Refuse a graph or schedule that this method cannot live with.

        Raises:
            TopologyError: It does not fulfil ``needs``; the message says which, and names a
                graph that does.
        """
        self.needs.check(self.name, graph_or_schedule)
