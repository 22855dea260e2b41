"""``decentlam``: decentralised momentum SGD, with no more bias than SGD without momentum."""

from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_share
from asyncddp.topology import symmetric_exponential

_MOMENTUM, _BEFORE = "momentum", "parameters before"


class DecentLaM(Algorithm):
    r"""DecentLaM: momentum of a gradient that includes the change by mixing with neighbours.

    .. math:: \tilde G = \frac{X - W (X - U(G(X)))}{\gamma}, \qquad
              M^{+} = \beta M + \tilde G, \qquad X^{+} = X - \gamma M^{+}

    with U the update of the wrapped optimizer, which has no momentum of its own, and :math:`\gamma`
    its learning rate in this step. With local momentum the bias is that of the step size
    :math:`\gamma / (1 - \beta)`, here it is that of :math:`\gamma`. It costs one message and two
    tensors of the model's size, and works with one symmetric graph; on others it diverges. Local
    steps are rounds with W = I.

    Args:
        beta: :math:`\beta` in [0, 1).

    Raises:
        ArgumentError: A :math:`\beta` out of range, or an optimizer with momentum.

    References:
        Yuan, Chen, Huang, Zhang, Pan, Xu, Yin, "DecentLaM: decentralized momentum SGD for
        large-batch deep training", ICCV 2021.
    """

    name = "decentlam"
    when = CommunicationTiming.AFTER_STEP
    how = (
        CommunicationPattern.NEIGHBORS,
        CommunicationPattern.MACHINES,
        CommunicationPattern.GLOBAL,
    )
    default_graph = symmetric_exponential
    needs = TopologyRequirements(doubly_stochastic=True, symmetric=True, static_only=True)
    alternative = "quasi_global_momentum"
    owns_momentum = changes_alone = True
    zero_state = (_MOMENTUM, _BEFORE)
    state_copies = 2

    def __init__(self, *, beta: float = 0.9) -> None:
        self.beta = checked_share("argument beta", beta)

    @override
    def before_update(self, bucket: AveragedBucket) -> None:
        bucket.state[_BEFORE].copy_(bucket.flat)

    @override
    def after_step(self, bucket: AveragedBucket) -> None:
        momentum = bucket.state[_MOMENTUM].mul_(self.beta)
        change = bucket.state[_BEFORE] - bucket.flat
        bucket.flat.sub_(momentum * bucket.step_sizes())
        momentum.add_(bucket.per_step_size(change))
