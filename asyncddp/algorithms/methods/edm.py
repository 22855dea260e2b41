"""``edm``: exact diffusion with momentum (EDM)."""

from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.corrected_diffusion import CorrectedDiffusion
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_share

_MOMENTUM = "momentum"


class ExactDiffusionMomentum(CorrectedDiffusion):
    r"""EDM: exact diffusion whose updates use momentum in place of the gradient.

    .. math:: M^{k} = \beta M^{k-1} + G(X^{k}), \qquad \psi^{k+1} = X^{k} - U(M^{k}), \qquad
              X^{k+1} = \tfrac12 (I + W) \big(\psi^{k+1} + X^{k} - \psi^{k}\big)

    with U the update of the wrapped optimizer, which has no momentum of its own and sees
    :math:`m_i` in place of the gradient. Otherwise it is like
    :class:`~asyncddp.algorithms.methods.exact_diffusion.ExactDiffusion`, with one more tensor kept.

    Args:
        beta: :math:`\beta` in [0, 1).

    Raises:
        ArgumentError: A :math:`\beta` out of range, or an optimizer with momentum.

    References:
        Hu, Chen, Sun, Xu, Yuan, "Exact diffusion with momentum: decentralized optimization under
        heterogeneous data", 2025.
    """

    name = "edm"
    needs = TopologyRequirements(doubly_stochastic=True, symmetric=True, static_only=True)
    owns_momentum = changes_alone = True
    zero_state = (*CorrectedDiffusion.zero_state, _MOMENTUM)
    state_copies = 2

    def __init__(self, *, beta: float = 0.9) -> None:
        self.beta = checked_share("argument beta", beta)

    @override
    def before_update(self, bucket: AveragedBucket) -> None:
        momentum = bucket.state[_MOMENTUM].mul_(self.beta).add_(bucket.gradient())
        bucket.set_gradient(momentum)
