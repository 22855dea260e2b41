"""Traits that an algorithm declares: what it averages, when, with whom, and how it compresses."""

from __future__ import annotations

from enum import Enum


class AveragedQuantity(Enum):
    """Kind of tensor that an algorithm averages: gradients, first moments or parameters."""

    GRADIENT = "gradient"
    MOMENTUM = "momentum"
    PARAMETER = "parameter"


class CompressionUse(Enum):
    """Effect of compression on an algorithm, and so whether it accepts a compressor."""

    AVERAGES = "averages"
    """The averaged tensor is compressed; errors average out, or error feedback repays them."""
    DIFFERENCES = "differences"
    """The algorithm sees each message by itself and makes up for errors, as by sending differences
    to what its neighbours know."""
    PERTURBS = "perturbs"
    """Ranks would not agree any more, so that it is refused unless the user asks for it."""


class JoinedRanks(Enum):
    """Part of ranks that are done, within ``join``, in the rounds of those that still train."""

    LEAVE = "leave"
    """They neither send nor get anything, and keep their models."""
    FOLLOW = "follow"
    """They get the average of the others, by which all ranks go on holding one model."""
    RELAY = "relay"
    """They pass on what others send, with nothing of their own."""


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
    """Starts by the clock, between two steps; the change is added between two later ones."""
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
    PAIR = "pair"
    """Pairs of ranks average atomically; no rank waits."""

    @property
    def windowed(self) -> bool:
        """True if ranks communicate through windows."""
        return self.value in ("put", "get", "accumulate")

    @property
    def one_sided(self) -> bool:
        """True if each rank goes on at its own pace."""
        return self.windowed or self is CommunicationPattern.PAIR
