"""Averaging rounds: one way to start, finish and count them, by several media.

A subclass of :class:`~.averaging_round.AveragingRound` is one way to average, such as
neighbor_allreduce: by messages, through windows, or in pairs. It is chosen by its name here. Only
the model averager begins rounds; methods see buckets alone. A round is counted where it ends.
"""

from __future__ import annotations

from asyncddp.algorithms.rounds.averaging_round import AveragingRound
from asyncddp.registry import PluginRegistry

_ROUNDS = "asyncddp.algorithms.rounds"

COMMUNICATIONS: PluginRegistry[type[AveragingRound]] = PluginRegistry(
    "communication",
    {
        "allreduce": f"{_ROUNDS}.message_round:AllreduceRound",
        "empty": f"{_ROUNDS}.averaging_round:LocalRound",
        "hierarchical_allreduce": f"{_ROUNDS}.message_round:HierarchicalAllreduceRound",
        "hierarchical_neighbor_allreduce": f"{_ROUNDS}.machine_round:MachineRound",
        "neighbor_allreduce": f"{_ROUNDS}.neighbor_round:NeighborRound",
        "pair_average": f"{_ROUNDS}.pair_round:PairRound",
        "win_accumulate": f"{_ROUNDS}.window_rounds:PushSumWindowRound",
        "win_get": f"{_ROUNDS}.window_rounds:WindowGetRound",
        "win_put": f"{_ROUNDS}.window_rounds:WindowPutRound",
    },
    group="asyncddp.communications",
)
