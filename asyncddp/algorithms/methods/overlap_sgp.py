"""``overlap_sgp``: stochastic gradient push with messages that may arrive some steps late."""

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_integer


class OverlapSGP(Algorithm):
    r"""Overlap SGP: push-sum whose messages may arrive a limited number of steps late.

    .. math:: x_i^{k+1/2} = x_i^{k} - U\big(g_i(z_i^{k})\big), \qquad
              \begin{pmatrix} x_i \\ p_i \end{pmatrix}^{k+1}
              = a_{ii}^{k} \begin{pmatrix} x_i^{k+1/2} \\ p_i^{k} \end{pmatrix}
              + \sum_{(j,\,l) \in A_i^k} a_{ij}^{l}
              \begin{pmatrix} x_j^{l+1/2} \\ p_j^{l} \end{pmatrix},
              \qquad z_i^{k+1} = x_i^{k+1} / p_i^{k+1}

    with :math:`A_i^k` the messages of neighbours that have arrived since the last step. At the end
    of step k, rank i waits until its in-neighbours have reached step k - s; so messages of the last
    s steps are in flight while gradients are computed. The push-sum weights are as late as their
    parameters, so that z stays unbiased. It is ``push_sum`` with ``max_staleness=s`` and without
    scaled steps, since all ranks make equally many; see there for all else. If all ranks are in
    step, no message is late.

    Args:
        staleness: s, of at least 0; 0 waits for the messages of the step itself.

    Raises:
        ArgumentError: It is no whole number of at least 0.

    References:
        Assran, Loizou, Ballas, Rabbat, "Stochastic gradient push for distributed deep learning",
        ICML 2019, algorithm 2, where s is called τ.
    """

    name = "overlap_sgp"
    when = CommunicationTiming.AFTER_BIASED_STEP
    how = (CommunicationPattern.ACCUMULATE,)
    needs = TopologyRequirements(strongly_connected=True)

    def __init__(self, *, staleness: int = 1) -> None:
        self.max_staleness = checked_integer("argument staleness", staleness, 0)
