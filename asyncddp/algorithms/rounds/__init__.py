"""Averaging rounds: a common interface, implemented by messages, windows and pairwise averaging.

A subclass of :class:`~.averaging_round.AveragingRound` is one way to average, such as
neighbor_allreduce, and is registered here by name. Only the model averager begins rounds; methods
see only buckets. A round is counted when it ends.
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
