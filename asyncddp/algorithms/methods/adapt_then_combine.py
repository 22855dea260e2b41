"""``adapt_then_combine``: the optimizer's step, then averaging of parameters with neighbours."""

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements


class AdaptThenCombine(Algorithm):
    r"""Decentralised SGD (diffusion): the optimizer's step first, then averaging with neighbours.

    .. math:: X^{+} = W \big(X - U(G(X))\big)

    with :math:`U` the optimizer's update, :math:`\gamma G(X)` for SGD. It is stable for
    :math:`\gamma \le 2 / L` on every graph, and its bias,
    :math:`O(\gamma \rho \zeta / (1 - \rho))`, is below that of ``adapt_with_combine``, which in
    turn hides the communication.

    References:
        Chen, Sayed, "Diffusion adaptation strategies for distributed optimization and learning over
        networks", IEEE TSP 60(8), 2012.
    """

    name = "adapt_then_combine"
    when = CommunicationTiming.AFTER_STEP
    how = (
        CommunicationPattern.NEIGHBORS,
        CommunicationPattern.MACHINES,
        CommunicationPattern.GLOBAL,
    )
    needs = TopologyRequirements(doubly_stochastic=True)
