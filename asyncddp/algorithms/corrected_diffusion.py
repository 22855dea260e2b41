"""Base class of exact diffusion and D²: diffusion with a correction that removes its bias."""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.topology import symmetric_exponential

_CORRECTION = "correction"


class CorrectedDiffusion(Algorithm):
    r"""Base class of diffusion that adds the last averaging's model change to each update.

    .. math:: \psi^{k+1} = X^{k} - U(G(X^{k})), \qquad C^{k} = X^{k} - \psi^{k}, \qquad
              X^{k+1} = \bar W \big(\psi^{k+1} + C^{k}\big)

    with U the update of the wrapped optimizer and :math:`C^0 = 0`, so that the first step is
    that of ``adapt_then_combine``. As C includes the last update, schedules of the learning rate
    need no further care. C is one tensor of the model's size, in float32 for half-precision
    parameters; :math:`\psi + C` is sent once to each neighbour, in that dtype.

    Attributes:
        lazy: True for :math:`\bar W = (I + W) / 2`, which has no negative eigenvalues; False for W.
    """

    lazy: ClassVar[bool] = True
    when = CommunicationTiming.AFTER_STEP
    how = (
        CommunicationPattern.NEIGHBORS,
        CommunicationPattern.MACHINES,
        CommunicationPattern.GLOBAL,
    )
    default_graph = symmetric_exponential
    alternative = "gradient_tracking"
    exact = True
    zero_state: ClassVar[tuple[str, ...]] = (_CORRECTION,)
    state_copies = 1

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        return bucket.state[_CORRECTION] + bucket.flat

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        correction = bucket.state[_CORRECTION]
        if self.lazy:
            correction.add_(bucket.flat).lerp_(received.mixed, 0.5)
        else:
            correction.copy_(received.mixed)
        correction.sub_(bucket.flat)
        bucket.flat.add_(correction)

    @override
    def restart(self, bucket: AveragedBucket, neighbors: NeighborTensors) -> None:
        bucket.state[_CORRECTION].zero_()
