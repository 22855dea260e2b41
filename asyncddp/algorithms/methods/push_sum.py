"""``push_sum``: stochastic gradient push (SGP), which averages parameters on directed graphs."""

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements


class PushSum(Algorithm):
    r"""Stochastic gradient push (SGP): decentralised SGD on directed graphs, by push-sum averaging.

    .. math:: x_i^{k+1/2} = x_i^{k} - s_i\, U\big(g_i(z_i^{k})\big), \qquad
              \begin{pmatrix} x_i \\ p_i \end{pmatrix}^{k+1}
              = \sum_j a_{ij}^{k} \begin{pmatrix} x_j^{k+1/2} \\ p_j^{k} \end{pmatrix}, \qquad
              z_i^{k+1} = x_i^{k+1} / p_i^{k+1}

    with U the optimizer's update. The model holds z, for gradients, evaluation and checkpoints. The
    shares of rank j sum to one: :math:`a_{ij} = 1 / (d_j + 1)` for itself and its
    :math:`d_j` out-neighbours of the round, on any strongly connected digraph, static or
    time-varying; weights of the graph are ignored. So :math:`\sum_i x_i` and :math:`\sum_i p_i` are
    conserved, including messages in flight, and the ranks tend to the mean, whereas averaging by
    rows of W would tend to a weighted mean.

    Without a scale, :math:`s_i = 1`, ranks that step more often count more, and the ranks tend to
    the optimum weighted by their rates. With ``scale_steps``, the default, :math:`s_i` is how many
    steps the ranks make on average to one of rank i, or less on all ranks alike where one would
    scale by more than 4; it is 1 where all are equally fast or meet in each round.

    A rank whose p is small makes large steps in z. It has given away more than it has got, as a
    rank does that is far ahead of its in-neighbours; ``max_staleness`` bounds that.

    References:
        Assran, Loizou, Ballas, Rabbat, "Stochastic gradient push for distributed deep learning",
        ICML 2019. Assran, Rabbat, "Asynchronous gradient push", IEEE TAC 66(1), 2021. Nedić,
        Olshevsky, "Stochastic gradient-push for strongly convex functions on time-varying directed
        graphs", IEEE TAC 61(12), 2016.
    """

    name = "push_sum"
    when = CommunicationTiming.AFTER_BIASED_STEP
    how = (CommunicationPattern.ACCUMULATE,)
    needs = TopologyRequirements(strongly_connected=True)
    scales_steps = True
