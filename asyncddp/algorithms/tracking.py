"""Base class of tracking algorithms: ranks estimate the average gradient or momentum."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.errors import ArgumentError

TRACKER, TRACKED = "tracker", "tracked"


class Tracking(Algorithm):
    r"""Base class of algorithms that descend along an estimate of the average gradient or momentum.

    .. math:: M^{k} = \beta M^{k-1} + G(X^{k}), \qquad Y^{k} = W Y^{k-1} + M^{k} - M^{k-1}

    with :math:`M^{-1} = Y^{-1} = 0`. The optimizer sees :math:`y_i` in place of the gradient. The
    mean of the trackers equals the mean of the :math:`m_i` in every step.

    Attributes:
        beta: Momentum coefficient :math:`\beta`; 0 tracks gradients.
    """

    how = (
        CommunicationPattern.NEIGHBORS,
        CommunicationPattern.MACHINES,
        CommunicationPattern.GLOBAL,
    )
    exact = True
    averaged_state = (TRACKER,)
    zero_state = (TRACKER, TRACKED)
    state_copies = messages = 2

    def __init__(self, form: Literal["atc", "diging"], beta: float) -> None:
        if form not in ("atc", "diging"):
            raise ArgumentError(f"argument form: expected 'atc' or 'diging', got {form!r}")
        lowest = None
        self.when = CommunicationTiming.AFTER_STEP
        if form == "diging":
            self.when, lowest = CommunicationTiming.BEFORE_FORWARD, -1.0
        self.needs = TopologyRequirements(doubly_stochastic=True, min_eigenvalue=lowest)
        self.form, self.beta = form, beta

    @override
    def before_update(self, bucket: AveragedBucket) -> None:
        tracker, before = bucket.state[TRACKER], bucket.state[TRACKED]
        tracked = bucket.gradient()
        if self.beta:
            tracked.add_(before, alpha=self.beta)
        tracker.add_(tracked).sub_(before)
        before.copy_(tracked)
        bucket.set_gradient(tracker)

    @override
    def restart(self, bucket: AveragedBucket, neighbors: NeighborTensors) -> None:
        bucket.state[TRACKER].copy_(bucket.state[TRACKED])
