"""``overlap_sgp``: stochastic gradient push whose messages travel while the next steps are made."""

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_integer


class OverlapSGP(Algorithm):
    r"""Overlap SGP: push-sum whose messages may come up to s steps late, and no later.

    .. math:: x_i^{k+1/2} = x_i^{k} - U\big(g_i(z_i^{k})\big), \qquad
              \begin{pmatrix} x_i \\ p_i \end{pmatrix}^{k+1}
              = a_{ii}^{k} \begin{pmatrix} x_i^{k+1/2} \\ p_i^{k} \end{pmatrix}
              + \sum_{(j,\,l) \in A_i^k} a_{ij}^{l}
              \begin{pmatrix} x_j^{l+1/2} \\ p_j^{l} \end{pmatrix},
              \qquad z_i^{k+1} = x_i^{k+1} / p_i^{k+1}

    with :math:`A_i^k` the messages of neighbours that have come since the last step, each once.
    Rank i waits at the end of step k until its in-neighbours have come to step k - s; so those of
    the last s steps travel while gradients are computed. Weights are as late as what they weigh, so
    that z stays unbiased. It is ``push_sum`` with ``max_staleness=s`` and steps that are not
    scaled, since all ranks make equally many; all else is said there. Where all ranks meet in each
    round nothing is late.

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
