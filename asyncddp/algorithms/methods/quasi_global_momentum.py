"""``quasi_global_momentum``: momentum of the averaged model's changes, not of local gradients."""

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_share

_MOMENTUM = "quasi-global momentum"


class QuasiGlobalMomentum(Algorithm):
    r"""QG-DSGDm: decentralised SGD with momentum of the changes of the averaged model.

    .. math:: X^{+} = W \big(X - U(\beta \hat M + G(X))\big), \qquad
              \hat M^{+} = \mu \hat M + (1 - \mu) \frac{X - X^{+}}{\gamma}

    with U the update of the wrapped optimizer, which has no momentum of its own, and :math:`\gamma`
    its learning rate in this step; elements whose rate is 0 leave their momentum to decay. It costs
    one message and one tensor of the model's size, on any doubly stochastic graph or schedule; its
    bias is that of ``adapt_then_combine``. Local steps are rounds with W = I.

    Args:
        beta: Weight of momentum, :math:`\beta` in [0, 1).
        mu: Decay of momentum, :math:`\mu` in [0, 1); None for :math:`\beta`.

    Raises:
        ArgumentError: A coefficient out of range, or an optimizer with momentum.

    References:
        Lin, Karimireddy, Stich, Jaggi, "Quasi-global momentum: accelerating decentralized deep
        learning on heterogeneous data", ICML 2021.
    """

    name = "quasi_global_momentum"
    when = CommunicationTiming.AFTER_STEP
    how = (
        CommunicationPattern.NEIGHBORS,
        CommunicationPattern.MACHINES,
        CommunicationPattern.GLOBAL,
    )
    needs = TopologyRequirements(doubly_stochastic=True)
    owns_momentum = changes_alone = True
    zero_state = (_MOMENTUM,)
    state_copies = 1

    def __init__(self, *, beta: float = 0.9, mu: float | None = None) -> None:
        self.beta = checked_share("argument beta", beta)
        self.mu = self.beta if mu is None else checked_share("argument mu", mu)

    @override
    def before_update(self, bucket: AveragedBucket) -> None:
        momentum = bucket.state[_MOMENTUM]
        bucket.set_gradient(bucket.gradient().add_(momentum, alpha=self.beta))
        momentum.mul_(self.mu).add_(self._in_steps(bucket), alpha=1.0 - self.mu)

    @override
    def after_step(self, bucket: AveragedBucket) -> None:
        bucket.state[_MOMENTUM].sub_(self._in_steps(bucket), alpha=1.0 - self.mu)

    def _in_steps(self, bucket: AveragedBucket) -> torch.Tensor:
        """Return the parameters divided by the learning rates; their differences are updates."""
        return bucket.per_step_size(bucket.new_state().copy_(bucket.flat))
