"""Churn on LS(1000): ranks die and come back while each family of methods trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from statistics import fmean

from asyncddp import simulate, topology
from asyncddp.topology.builders import TopologyLike
from benchmarks.methods.contender import Contender
from benchmarks.methods.grid import Grid, Values
from benchmarks.ranks import Advance

_RANKS, _STEPS = 1000, 100
_LR, _SEED = 0.05, 0
_CHURN = (1, 10, 30)
_ONE_PEER = "one_peer_exponential"
_RARELY = {"communication_interval": 5}
_FAMILIES: Mapping[str, tuple[TopologyLike | None, Mapping[str, int | str]]] = {
    "adapt_then_combine": (_ONE_PEER, {}),
    "decentlam": (None, {}),
    "noloco": (None, _RARELY),
    "gradient_tracking": (_ONE_PEER, {}),
    "exact_diffusion": (None, {}),
    "choco_sgd": (None, {"compression": "bf16"}),
    "relay_sgd": (None, {}),
    "push_sum": (_ONE_PEER, {}),
    "win_put": (_ONE_PEER, {}),
    "ad_psgd": (topology.random_matching, {}),
    "diloco": (None, _RARELY),
    "gradient_allreduce": (None, {}),
}
"""A method of each family: its topology, which can be drawn anew, or None for its own; settings."""
_QUICK = ("adapt_then_combine", "gradient_tracking", "diloco")
_NOTE = (
    "Means over records in the last half of {steps} steps of {lr:g} from 0 on {ranks} ranks; whole "
    "batches in float64. p %: so many of the ranks die at random steps, and come back {away} steps "
    "later with the model of another. The topology is drawn anew for each view; 'old graph': its "
    "edges stay, and weights of the dead go to their neighbours' own. '-': refused. Errors are "
    "||X - 1 x*'|| / (sqrt(n) ||x*||) over the living, with x* the optimum of all ranks' data."
)


def lives(percent: int, ranks: int, steps: int, seed: int) -> simulate.Scenario:
    """Draw who dies and when; all come back later, if the run is long enough."""
    chance = Random(seed)
    dead = chance.sample(range(ranks), ranks * percent // 100)
    crashes = {rank: chance.randrange(1, steps) for rank in sorted(dead)}
    away = steps // 2
    arrivals = {rank: died + away for rank, died in crashes.items() if died + away < steps}
    return simulate.Scenario(crashes=crashes, arrivals=arrivals)


def scenarios(quick: bool, ranks: int, steps: int) -> dict[str, simulate.Scenario]:
    """Return the scenarios by the columns of the tables."""
    found = {"no churn": simulate.Scenario()}
    for percent in _CHURN[2:] if quick else _CHURN:
        drawn = lives(percent, ranks, steps, _SEED)
        found[f"{percent} %"] = drawn
        found[f"{percent} %, old graph"] = replace(drawn, redraw=False)
    return found


def grids(quick: bool, advance: Advance) -> list[Grid]:
    """Compare errors and consensus distances with and without churn."""
    ranks, steps = (40, 40) if quick else (_RANKS, _STEPS)
    problem, columns = simulate.least_squares(ranks), scenarios(quick, ranks, steps)
    rows, runs = _QUICK if quick else tuple(_FAMILIES), {}
    for name in rows:
        graph, settings = _FAMILIES[name]
        for column, scenario in columns.items():
            advance(f"churn: {name}, {column}")
            one = Contender(name, name, {**settings, "scenario": scenario})
            every = steps // 20
            runs[name, column] = one.train(problem, _LR, graph, steps=steps, record_every=every)
    return grids_of(rows, list(columns), runs, ranks, steps)


def grids_of(
    rows: Sequence[str],
    columns: Sequence[str],
    runs: Mapping[tuple[str, str], simulate.Run | None],
    ranks: int,
    steps: int,
) -> list[Grid]:
    """Return the errors and the consensus distances of all runs, in the last half of the steps."""
    measures = {"error": "error", "consensus_distance": "consensus distance"}
    found = []
    for measure, words in measures.items():
        values: dict[tuple[str, str], Values] = {
            key: (fmean(getattr(run, measure)[-10:].tolist()),)
            for key, run in runs.items()
            if run is not None
        }
        title = f"{words} under churn, {ranks} ranks"
        key, note = (
            f"churn_{measure}",
            _NOTE.format(ranks=ranks, steps=steps, away=steps // 2, lr=_LR),
        )
        axis = f"mean {words} in the last half of the steps"
        found.append(Grid(key, title, rows, columns, values, _text, axis, log=True, note=note))
    return found


def _text(values: Values) -> str:
    return f"{values[0]:.3g}" if values[0] > 1e-11 else "0"
