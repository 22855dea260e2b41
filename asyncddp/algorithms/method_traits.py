"""Traits that an algorithm declares: averaged quantity, timing, communication, compression."""

from __future__ import annotations

from enum import Enum


class AveragedQuantity(Enum):
    """Kind of tensor that an algorithm averages: gradients, first moments or parameters."""

    GRADIENT = "gradient"
    MOMENTUM = "momentum"
    PARAMETER = "parameter"


class CompressionUse(Enum):
    """Effect of compression on an algorithm, which determines if a compressor is accepted."""

    AVERAGES = "averages"
    """The averaged tensor is compressed; errors average out, or error feedback corrects them."""
    DIFFERENCES = "differences"
    """The algorithm handles single messages and corrects errors itself, as by sending differences
    to tensors that its neighbours know."""
    PERTURBS = "perturbs"
    """Ranks would not reach consensus; compression is refused unless the user insists."""


class JoinedRanks(Enum):
    """Role of ranks that have run out of data in the averaging rounds of ranks that still train."""

    LEAVE = "leave"
    """Joined ranks neither send nor receive, and keep their models."""
    FOLLOW = "follow"
    """Joined ranks receive the average of the active ranks, so that all ranks hold one model."""
    RELAY = "relay"
    """Joined ranks forward messages of other ranks, without a contribution of their own."""


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
    INTERVAL = "interval"
    """Starts at fixed time intervals, between steps; the change is added between later steps."""
    THROUGH_STEP = "through_step"
    """Starts with the forward pass; the change due to averaging is added after the step."""


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
    """Each rank adds shares of its tensors to neighbours' windows; no rank waits."""
    PAIR = "pair"
    """Pairs of ranks average atomically; no rank waits."""

    @property
    def windowed(self) -> bool:
        """True if ranks communicate through windows."""
        return self.value in ("put", "get", "accumulate")

    @property
    def one_sided(self) -> bool:
        """True if no rank waits for another."""
        return self.windowed or self is CommunicationPattern.PAIR
