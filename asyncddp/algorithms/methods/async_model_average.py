"""``async_model_average``: averages a copy of the model during training, then adds the change."""

from typing import Literal

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.errors import ArgumentError


class AsyncModelAverage(Algorithm):
    r"""Asynchronous model averaging that preserves the optimizer steps made in the meantime.

    .. math:: x_i^{+} = y_i + \Big(w_{ii} s_i + \sum_j w_{ij} b_j - s_i\Big), \qquad
              y_i = s_i - \sum_{m=1}^{J} U_m

    Rank i publishes its parameters :math:`s_i`, makes J steps (``num_steps_per_communication``)
    which lead to :math:`y_i`, and then adds the change of :math:`s_i` by averaging, with
    :math:`b_j` the last parameters that neighbour j has published, or :math:`s_i` before their
    first arrival. With J = 1 and ranks in step it is ``adapt_with_combine``,
    :math:`W X - U(G(X))`, except that weight decay applies to X in place of W X; with larger J the
    average is J steps old, and the steps count in full.

    With ``sync_interval_ms`` it averages at fixed time intervals, over all ranks or with
    neighbours, by messages: a round begins when the interval has passed since the last one, its
    change is added when it has arrived, and the steps of a rank never wait. All ranks take part in
    the same rounds, at the pace of the slowest rank; ``abort()`` ends them when all ranks have
    called it, before evaluation and at the end, and ``resume()`` restarts them. At the end replicas
    differ by the steps since the last round.

    Args:
        sync_interval_ms: Milliseconds from the end of a round to the next one; None averages by
            steps, through windows.
        peer_selection_mode: With an interval: ``"all"`` ranks, or ``"neighbors"``.
        warmup_steps: Steps that ``gradient_allreduce`` makes before.

    Raises:
        ArgumentError: An interval that is not above 0, another mode, or less than no steps.

    References:
        Gan et al., "Bagua: scaling up distributed learning with system relaxations", VLDB 2021,
        there with all ranks in place of neighbours.
    """

    name = "async_model_average"
    when = CommunicationTiming.THROUGH_STEP
    how = (CommunicationPattern.PUT, CommunicationPattern.GET)
    needs = TopologyRequirements(doubly_stochastic=True, min_eigenvalue=-1.0)

    def __init__(
        self,
        *,
        sync_interval_ms: float | None = None,
        peer_selection_mode: Literal["all", "neighbors"] = "all",
        warmup_steps: int = 0,
    ) -> None:
        if peer_selection_mode not in ("all", "neighbors"):
            raise ArgumentError(
                "argument peer_selection_mode: expected 'all' or 'neighbors', got "
                f"{peer_selection_mode!r}"
            )
        if sync_interval_ms is not None:
            if not isinstance(sync_interval_ms, (int, float)) or not sync_interval_ms > 0:
                raise ArgumentError(
                    "argument sync_interval_ms: expected a number above 0, or None to average by "
                    f"steps, got {sync_interval_ms!r}"
                )
            self.when = CommunicationTiming.INTERVAL
            self.how = (CommunicationPattern.GLOBAL, CommunicationPattern.NEIGHBORS)
            chosen = {"all": "allreduce", "neighbors": "neighbor_allreduce"}
            self.default_communication = chosen[peer_selection_mode]
        self.sync_interval_ms, self.peer_selection_mode = sync_interval_ms, peer_selection_mode
        self.warmup_steps = checked_integer("argument warmup_steps", warmup_steps, 0)

    @override
    def warms_up(self, optimizer: torch.optim.Optimizer, steps: int) -> bool:
        return steps < self.warmup_steps
