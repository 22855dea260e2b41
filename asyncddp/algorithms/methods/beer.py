"""``beer``: gradient tracking with compressed differences of models and trackers."""

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.compressed_gossip import CompressedGossip
from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.tensors.allocation import zeros_like

_MODEL, _MIXED_MODEL = "public model", "mixed public models"
_TRACKER, _TRACKED = "tracker", "tracked"
_PUBLIC_TRACKER, _MIXED_TRACKER = "public tracker", "mixed public trackers"
_PUBLIC = (_MODEL, _MIXED_MODEL), (_PUBLIC_TRACKER, _MIXED_TRACKER)


class Beer(CompressedGossip):
    r"""BEER: gradient tracking with any compressor, without bias.

    .. math:: V^{k} &= V^{k-1} + \gamma_c (W - I) \hat V^{k-1} + G(X^{k}) - G(X^{k-1}) \\
              X^{k+1} &= X^{k} - U(V^{k}) + \gamma_c (W - I) \hat X^{k} \\
              \hat X^{k+1} &= \hat X^{k} + Q(X^{k+1} - \hat X^{k}), \qquad
              \hat V^{k} = \hat V^{k-1} + Q(V^{k} - \hat V^{k-1})

    with U the update of the wrapped optimizer, which sees :math:`v_i` in place of the gradient, and
    zeros before the first step. A message contains two differences, each encoded separately. The
    mean of the trackers equals the mean of the gradients in every step, for any compressor, so that
    ranks reach the optimum of the mean loss even if their data differ. A rank keeps six tensors of
    the model's size, in float32 for half-precision parameters: its public model and tracker, their
    mixed versions, the tracker and the last gradient. Trackers are sent a step earlier than in the
    paper, which omits the first. Local steps are rounds with W = I. If the set of training ranks
    changes within ``join``, trackers are reset, and public tensors are sent once uncompressed.

    Args:
        consensus_step: :math:`\gamma_c` in (0, 1]; None takes half of the share of the squared norm
            that the compressor keeps of normally distributed numbers.

    Raises:
        ArgumentError: A step outside of (0, 1].

    References:
        Zhao, Li, Li, Richtárik, Chi, "BEER: fast O(1/T) rate for decentralized nonconvex
        optimization with communication compression", NeurIPS 2022.
    """

    name = "beer"
    how = (CommunicationPattern.NEIGHBORS,)
    alternative = "gradient_tracking"
    exact = True
    zero_state = (_MODEL, _MIXED_MODEL, _PUBLIC_TRACKER, _MIXED_TRACKER, _TRACKER, _TRACKED)
    state_copies = 6
    messages = 2

    def __init__(self, *, consensus_step: float | None = None) -> None:
        super().__init__(consensus_step=consensus_step)

    @override
    def before_update(self, bucket: AveragedBucket) -> None:
        tracker, before = bucket.state[_TRACKER], bucket.state[_TRACKED]
        gradient = bucket.gradient()
        tracker.add_(gradient).sub_(before)
        before.copy_(gradient)
        bucket.set_gradient(tracker)

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        state = bucket.state
        model = bucket.flat + self._pull(bucket, _MODEL, _MIXED_MODEL) - state[_MODEL]
        return torch.stack([model, state[_TRACKER] - state[_PUBLIC_TRACKER]], dim=-2)

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        state, mixed = bucket.state, received.mixed
        bucket.flat.add_(self._pull(bucket, _MODEL, _MIXED_MODEL))
        own = zeros_like(mixed)
        received.add_own_to(own)
        for place, (public, public_mixed) in enumerate(_PUBLIC):
            state[public].add_(own.select(-2, place))
            state[public_mixed].add_(mixed.select(-2, place))
        state[_TRACKER].add_(self._pull(bucket, _PUBLIC_TRACKER, _MIXED_TRACKER))

    @override
    def restart(self, bucket: AveragedBucket, neighbors: NeighborTensors) -> None:
        state = bucket.state
        for public, mixed in _PUBLIC:
            state[mixed].copy_(neighbors.mixed(state[public]))
        state[_TRACKER].copy_(state[_TRACKED])

    def _pull(self, bucket: AveragedBucket, public: str, mixed: str) -> torch.Tensor:
        """Return the change of a rank's own tensor by gossip of public tensors."""
        return (bucket.state[mixed] - bucket.state[public]).mul_(self.step_of(bucket))

    @override
    def step_of(self, bucket: AveragedBucket) -> float:
        step = super().step_of(bucket)
        return step if self.consensus_step is not None else step / 2
