"""``adapt_with_combine``: averages parameters with neighbours while gradients are computed."""

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements


class AdaptWithCombine(Algorithm):
    r"""Decentralised SGD whose averaging overlaps the forward and backward pass.

    .. math:: X^{+} = W X - U\big(G(X)\big)

    with :math:`U` the optimizer's update, :math:`\gamma G(X)` for SGD. The gradient is computed at
    the parameters before averaging, and applied to the averaged ones. With a constant step size
    :math:`\gamma < (1 + \lambda_{\min}(W)) / L` it converges to a neighbourhood of the optimum of
    radius :math:`O(\gamma \zeta / (1 - \rho))`, where :math:`\zeta` is the difference between
    the ranks' gradients and :math:`\rho = \lVert W - J \rVert_2`.

    References:
        Nedić, Ozdaglar, "Distributed subgradient methods for multi-agent optimization", IEEE TAC
        54(1), 2009. Lian et al., "Can decentralized algorithms outperform centralized algorithms?",
        NeurIPS 2017.
    """

    name = "adapt_with_combine"
    when = CommunicationTiming.BEFORE_FORWARD
    how = (
        CommunicationPattern.NEIGHBORS,
        CommunicationPattern.MACHINES,
        CommunicationPattern.GLOBAL,
    )
    needs = TopologyRequirements(doubly_stochastic=True, min_eigenvalue=-1.0)
