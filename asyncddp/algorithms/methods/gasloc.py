"""``gasloc``: many local steps, then an outer step whose momentum also accelerates gossip."""

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.algorithms.outer_nesterov import OUTER, OuterStep
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_positive
from asyncddp.topology import GraphOrSchedule, Schedule, TopologyError, describe, random_matching

_BEFORE = "outer parameters before averaging"
_MOST = 1.5  # of α / (1 - γ) on graphs that change: beyond it base_k diverges


class GASLoC(OuterStep):
    r"""GASLoC: H local steps, then an outer step whose momentum also accelerates the gossip.

    .. math:: v_i = \theta_i + \eta\, g_i, \qquad
              \theta_i \leftarrow v_i - \alpha \Big(v_i - \sum_j w_{ij} v_j\Big)
              + \gamma\, (v_i - v_i^-)

    with :math:`g_i` the change of the parameters in H steps of the user's optimizer, and
    :math:`v_i^-` the :math:`v_i` of the round before. :math:`\Lambda = I - W` is the Laplacian of
    the round's graph, or matching: by default w pairs ranks up at random. The mean over ranks makes
    DiLoCo's Nesterov step. On one graph whose :math:`\Lambda` has eigenvalues from :math:`\mu` to L
    beside 0, ranks come together as by Polyak's heavy ball, in :math:`\sqrt{L / \mu}` rounds in
    place of :math:`L / \mu`, with :math:`\alpha = 4 / (\sqrt L + \sqrt \mu)^2` and
    :math:`\sqrt\gamma = (\sqrt L - \sqrt\mu) / (\sqrt L + \sqrt\mu)`. It diverges from
    :math:`\alpha L = 2 (1 + \gamma)` on, and on graphs that change where :math:`\alpha` is more
    than about :math:`\tfrac32 (1 - \gamma)`. A round sends one message to each neighbour; a rank
    keeps :math:`\theta_i` and :math:`v_i^-`.

    Args:
        communication_interval: H, in steps of the optimizer, not backward passes.
        outer_lr: :math:`\eta` above 0.
        outer_momentum: :math:`\gamma` in [0, 1).
        consensus_rate: :math:`\alpha` above 0; None for 1 on one graph, and for
            :math:`1 - \gamma` on graphs that change.

    Raises:
        ArgumentError: A number out of range.

    References:
        Cagnasso, Belilovsky, Oyallon, "Unifying local communications and local updates for LLM
        pretraining", 2026, whose formulas were seen, but not its constants.
    """

    name = "gasloc"
    how = (CommunicationPattern.NEIGHBORS,)
    default_graph = random_matching
    needs = TopologyRequirements(doubly_stochastic=True, symmetric=True)
    parameter_state = (OUTER, _BEFORE)
    zero_state = ()

    def __init__(
        self,
        *,
        communication_interval: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        consensus_rate: float | None = None,
    ) -> None:
        super().__init__(communication_interval, outer_lr, outer_momentum)
        self.consensus_rate = consensus_rate
        self._rate = checked_positive(
            "argument consensus_rate", 1.0 if consensus_rate is None else consensus_rate
        )
        least = 1 - 2 * (1 + self.outer_momentum) / self._rate
        self.needs = TopologyRequirements(
            doubly_stochastic=True,
            symmetric=self.outer_momentum > 0,
            min_eigenvalue=least if least >= -1 else None,  # which no W is below
        )

    @override
    def check(self, graph_or_schedule: GraphOrSchedule) -> None:
        super().check(graph_or_schedule)
        most, given = _MOST * (1 - self.outer_momentum), self.consensus_rate
        if given is not None and given > most and _changes(graph_or_schedule):
            raise TopologyError(
                f"gasloc cannot run on {describe(graph_or_schedule)}: it changes from round to "
                f"round, but consensus_rate={given} with outer_momentum={self.outer_momentum} "
                f"needs one graph. Use at most {most:.3g}, or None"
            )

    @override
    def schedule_along(self, given: GraphOrSchedule) -> Schedule:
        if self.consensus_rate is None:
            self._rate = 1 - self.outer_momentum if _changes(given) else 1.0
        return super().schedule_along(given)

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        outer = bucket.state[OUTER]
        return outer.lerp(bucket.flat.to(outer.dtype), self.outer_lr)

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        outer, before = bucket.state[OUTER], bucket.state[_BEFORE]
        proposed = self.outgoing(bucket)
        torch.lerp(proposed, received.mixed, self._rate, out=outer)
        outer.add_(proposed - before, alpha=self.outer_momentum)
        before.copy_(proposed)
        bucket.flat.copy_(outer)


def _changes(given: GraphOrSchedule) -> bool:
    return isinstance(given, Schedule) and given.period != 1
