"""``pull_get``: asynchronous averaging by one-sided gets from the neighbours' windows."""

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements


class PullGet(Algorithm):
    r"""Asynchronous decentralised SGD by one-sided gets: ranks read neighbours' windows on demand.

    .. math:: x_i^{+} = w_{ii} x_i + \sum_j w_{ij} x_j(k_j) - U\big(g_i(x_i)\big)

    with :math:`x_j(k_j)` the last parameters that neighbour j has published, and U the optimizer's
    update. When the first forward pass after a step starts, a rank publishes its parameters and
    gets those of its neighbours; it mixes them just before the optimizer's step. A fast rank with
    slow neighbours sends nothing that is not read. Otherwise it is like ``win_put``; ranks in step
    make the rounds of ``adapt_with_combine``.

    References:
        Ying et al., "BlueFog: make decentralized algorithms practical for optimization and deep
        learning", 2021. Lian et al., "Asynchronous decentralized parallel stochastic gradient
        descent", ICML 2018.
    """

    name = "pull_get"
    when = CommunicationTiming.BEFORE_FORWARD
    how = (CommunicationPattern.GET,)
    needs = TopologyRequirements(doubly_stochastic=True, min_eigenvalue=-1.0)
