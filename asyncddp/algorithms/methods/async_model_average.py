"""``async_model_average``: averages a copy while training goes on, then adds the change."""

from asyncddp.algorithms.algorithm import Algorithm, CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements


class AsyncModelAverage(Algorithm):
    r"""Asynchronous model averaging that keeps the optimizer steps made while it was running.

    .. math:: x_i^{+} = y_i + \Big(w_{ii} s_i + \sum_j w_{ij} b_j - s_i\Big), \qquad
              y_i = s_i - \sum_{m=1}^{J} U_m

    Rank i publishes its parameters :math:`s_i`, makes J steps (``num_steps_per_communication``)
    which lead it to :math:`y_i`, and then adds what averaging has changed in what it had
    published, with :math:`b_j` what neighbour j has published last. Where that has not come yet,
    :math:`s_i` takes its place. With J = 1 and ranks that meet in each round it is
    ``adapt_with_combine``, :math:`W X - U(G(X))`, but that U decays X in place of W X where it
    decays weights; with larger J the average is J steps old, and the steps count in full.

    References:
        Gan et al., "Bagua: scaling up distributed learning with system relaxations", VLDB 2021,
        there with all ranks in place of neighbours.
    """

    name = "async_model_average"
    when = CommunicationTiming.THROUGH_STEP
    how = (CommunicationPattern.PUT, CommunicationPattern.GET)
    needs = TopologyRequirements(doubly_stochastic=True, min_eigenvalue=-1.0)
