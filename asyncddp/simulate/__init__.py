"""Simulation of n virtual ranks in one process, with the same algorithms as on real ranks.

Here belong problems, clocks and networks of virtual ranks, and the record of a run. Users and
``asyncddp compare`` call it. The methods are those of ``algorithms``, and results equal those of
real ranks to 1e-12.
"""

from __future__ import annotations

from asyncddp.simulate.comparison import MethodComparison, compare, draw
from asyncddp.simulate.problem import Problem
from asyncddp.simulate.problems import digits, least_squares
from asyncddp.simulate.record import Run, table
from asyncddp.simulate.scenario import Scenario
from asyncddp.simulate.stacked_optimizer import optimizer_named
from asyncddp.simulate.training import train

__all__ = [
    "MethodComparison",
    "Problem",
    "Run",
    "Scenario",
    "compare",
    "digits",
    "draw",
    "least_squares",
    "optimizer_named",
    "table",
    "train",
]
