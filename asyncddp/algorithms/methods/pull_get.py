"""``pull_get``: read the neighbours' parameters from their windows, and average with them."""

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements


class PullGet(Algorithm):
    r"""Asynchronous decentralised SGD by one-sided gets: ranks read neighbours' windows on demand.

    .. math:: x_i^{+} = w_{ii} x_i + \sum_j w_{ij} x_j(k_j) - U\big(g_i(x_i)\big)

    with :math:`x_j(k_j)` what neighbour j has let others get last, and U the optimizer's update. A
    rank lets others get its parameters, and gets theirs, as the first forward pass after a step
    starts; it mixes just before the optimizer's step. A fast rank whose neighbours are slow sends
    nothing that nobody reads; all else is as with pushing, and synchronous rounds are those of
    ``adapt_with_combine``.

    References:
        Ying et al., "BlueFog: make decentralized algorithms practical for optimization and deep
        learning", 2021. Lian et al., "Asynchronous decentralized parallel stochastic gradient
        descent", ICML 2018.
    """

    name = "pull_get"
    when = CommunicationTiming.BEFORE_FORWARD
    how = (CommunicationPattern.GET,)
    needs = TopologyRequirements(doubly_stochastic=True, min_eigenvalue=-1.0)
