"""``streaming_diloco``: DiLoCo for one fragment of the model at a time, during training."""

from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.outer_nesterov import OUTER, FragmentNesterov
from asyncddp.algorithms.wrapper_setup import checked_integer, checked_share
from asyncddp.errors import ArgumentError


class StreamingDiLoCo(FragmentNesterov):
    r"""Streaming DiLoCo: outer steps of one model fragment at a time, overlapped with local steps.

    .. math:: \Delta_p = \frac1n \sum_j Q(\theta_p - \theta_{j,p}), \qquad
              m_p \leftarrow \mu m_p + \Delta_p, \qquad
              \theta_p \leftarrow \theta_p - \eta\, (\Delta_p + \mu m_p)

    for fragment p of P after steps :math:`(p + 1) h, (p + 1 + P) h, \dots`, and :math:`\tau` steps
    after each of these

    .. math:: \theta_{i,p} \leftarrow \alpha\, \theta_{i,p} + (1 - \alpha)\, \theta_p

    with h the steps from one round to the next, so that the whole model is averaged every
    :math:`H = P h` steps; a message has :math:`\tau` steps to arrive. Fragments are consecutive
    parameters, of about equal size. With a compressor Q, such as ``"qsgd_int4"``, outer gradients
    are sent compressed, and all ranks decode the same mean. It keeps :math:`\theta` and m, two
    tensors of the model's size; all ranks begin from one model.

    Args:
        communication_interval: h, in steps of the optimizer, not backward passes.
        fragments: P, at most the number of parameters; None for 4, of which some may be empty.
        delay: :math:`\tau`, less than h; None for 1, or for 0 where h is 1.
        mixing: :math:`\alpha` in [0, 1).
        outer_lr: :math:`\eta` above 0.
        outer_momentum: :math:`\mu` in [0, 1).

    Raises:
        ArgumentError: A number out of range, or more fragments than parameters.

    References:
        Douillard et al., "Streaming DiLoCo with overlapping communication: towards a distributed
        free lunch", 2025.
    """

    name = "streaming_diloco"

    def __init__(
        self,
        *,
        communication_interval: int = 25,
        fragments: int | None = None,
        delay: int | None = None,
        mixing: float = 0.5,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        super().__init__(communication_interval, fragments, outer_lr, outer_momentum)
        interval = communication_interval
        chosen = min(1, interval - 1) if delay is None else delay
        self.delay = checked_integer("argument delay", chosen, 0)
        if self.delay >= interval:
            raise ArgumentError(
                f"argument delay: expected less than communication_interval={interval}, so that a "
                f"fragment arrives before the next is sent, got {delay!r}"
            )
        self.mixing = checked_share("argument mixing", mixing)

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        outer = self.step_outer(bucket, received.mixed)
        if bucket.joined:  # no step follows in which to mix it
            bucket.flat.copy_(outer)

    @override
    def after_step(self, bucket: AveragedBucket) -> None:
        if bucket.steps == self.delay and bucket.round >= 0 and self.takes_part(bucket):
            outer = bucket.state[OUTER]
            bucket.flat.copy_(outer.lerp(bucket.flat.to(outer.dtype), self.mixing))
