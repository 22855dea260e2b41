"""``ad_psgd``: asynchronous decentralised SGD with atomic pairwise averaging."""

from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements, pairs_along
from asyncddp.topology import GraphOrSchedule, Schedule, random_matching


class ADPSGD(Algorithm):
    r"""AD-PSGD: asynchronous SGD in which random pairs of ranks average atomically and never wait.

    .. math:: x_i, x_j \leftarrow \frac{x_i + x_j}{2} \quad \text{at any time}, \qquad
              x_i \leftarrow x_i - U\big(g_i(\hat x_i)\big)

    with :math:`\hat x_i` the parameters at the start of the gradient computation, since when the
    rank may have averaged several times, and U the optimizer's update. In its own round k a rank
    asks its partner of that round, by default a random one; the partner answers while it computes.
    The mean over ranks is kept for any delays, and a slow rank delays no other rank. If all ranks
    are in step, it is ``adapt_with_combine`` on pairs. Ranks that step more often have more weight,
    unless ``scale_steps`` scales their steps, as in ``push_sum``. A rank keeps one copy of its
    parameters, for others to average with.

    References:
        Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel stochastic gradient descent",
        ICML 2018; there a bipartite graph, of which one side asks, keeps ranks from deadlock.
    """

    name = "ad_psgd"
    when = CommunicationTiming.BEFORE_FORWARD
    how = (CommunicationPattern.PAIR,)
    needs = TopologyRequirements(symmetric=True, strongly_connected=True, pairs=True)
    scales_steps = False

    @override
    def default_topology(self, nodes: int) -> GraphOrSchedule | None:
        return random_matching(nodes)

    @override
    def schedule_along(self, given: GraphOrSchedule) -> Schedule:
        return pairs_along(given)
