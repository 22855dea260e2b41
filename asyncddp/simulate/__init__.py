"""Simulation of n virtual ranks in one process, by the same methods as on real ones."""

from __future__ import annotations

from asyncddp.simulate.problem import Problem
from asyncddp.simulate.problems import least_squares
from asyncddp.simulate.record import Run, table
from asyncddp.simulate.scenario import Scenario
from asyncddp.simulate.training import train

__all__ = ["Problem", "Run", "Scenario", "least_squares", "table", "train"]
