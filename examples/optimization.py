"""Exact methods beside plain diffusion, on problems whose optimum is known.

    asyncddp run -np 4 examples/optimization.py
    torchrun --nproc-per-node 4 examples/optimization.py --problem logistic --rate 0.5
    python examples/optimization.py --ranks 8 --out optimization.png      # ranks are threads

Every rank has data of its own, which another model has made: what is best for one rank is not best
for all. All look for the one model x* that minimises the mean of their losses f_i, by steps of a
constant size with the gradient of all of a rank's data. How far do they come?

    adapt_then_combine     diffusion, W (X - rate G): ends at a distance from x* …
    … half the rate        … which is proportional to the step size, the *bias*
    exact_diffusion        the same messages and a correction: without a bias, on symmetric graphs
    gradient_tracking      two messages; follows the mean gradient: without a bias
    push_sum               diffusion on a directed graph, where no W is doubly stochastic: a bias
    push_diging            gradient tracking on a directed graph: without a bias

None of these methods is written here: each is the argument ``algorithm=`` of the wrapper around
torch's SGD. The counterpart in BlueFog is its example pytorch_optimization.py, which writes exact
diffusion, gradient tracking and push-DIGing by hand, for the same two problems.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import asyncddp as bf
from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS

ROWS, UNKNOWNS = 50, 10
RATES = {"least_squares": 0.1, "logistic": 0.5}
Loss = Callable[[torch.Tensor], torch.Tensor]


def directed(n: int) -> nx.DiGraph[int]:
    """A one-way ring with a shortcut: some ranks send twice, some receive twice."""
    graph: nx.DiGraph[int] = nx.DiGraph([(rank, (rank + 1) % n) for rank in range(n)])
    graph.add_edge(0, n // 2)
    return topology.push_weights(graph)  # each rank's shares of what it gives sum to one


METHODS = {
    "adapt_then_combine": ("adapt_then_combine", topology.ring, 1.0),
    "adapt_then_combine, half the rate": ("adapt_then_combine", topology.ring, 0.5),
    "exact_diffusion": ("exact_diffusion", topology.ring, 1.0),
    "gradient_tracking": ("gradient_tracking", topology.ring, 1.0),
    "push_sum": ("push_sum", directed, 1.0),
    "push_diging": ("push_diging", directed, 1.0),
}
"""By name: the algorithm, its graph of n ranks, and its part of ``--rate``."""


def main() -> None:
    """Run on the ranks that a launcher has started, else on threads."""
    options = parse_options()
    bf.init()
    if bf.size() > 1:
        run_on_all_ranks(options)
    else:
        with bf.local_world(options.ranks) as world:
            world.run(run_on_all_ranks, options)


def run_on_all_ranks(options: argparse.Namespace) -> None:
    """Find the optimum, let each method look for it, then say and draw how far it came."""
    found: dict[str, dict[str, list[float]]] = {}
    for problem in options.problem:
        loss = make_loss(problem)
        optimum = find_optimum(loss)
        found[problem] = {name: descend(name, problem, loss, optimum, options) for name in METHODS}
    if bf.rank() == 0:
        for problem, curves in found.items():
            show_table(problem, curves)
        if options.out:
            save_picture(found, options.out)
            print(f"The picture is {options.out}.")


def make_loss(problem: str) -> Loss:
    """This rank's loss f_i, a function of the model x."""
    chance = torch.Generator().manual_seed(1000 + bf.rank())  # other data on each rank
    inputs = torch.randn(ROWS, UNKNOWNS, generator=chance, dtype=torch.float64)
    own = 1 + torch.randn(UNKNOWNS, generator=chance, dtype=torch.float64)
    targets = inputs @ own + 0.1 * torch.randn(ROWS, generator=chance, dtype=torch.float64)
    if problem == "least_squares":
        return lambda x: (inputs @ x - targets).square().mean() / 2
    labels = (targets > 0).double()
    return lambda x: (
        F.binary_cross_entropy_with_logits(inputs @ x, labels) + 0.05 * x.square().sum() / 2
    )


def find_optimum(loss: Loss) -> torch.Tensor:
    """Newton's method on the mean loss, whose derivatives are averages over all ranks."""
    x = torch.zeros(UNKNOWNS, dtype=torch.float64)
    for _ in range(20):
        gradient = bf.allreduce(torch.autograd.functional.jacobian(loss, x))
        hessian = bf.allreduce(torch.autograd.functional.hessian(loss, x))
        x = x - torch.linalg.solve(hessian, gradient)
    return x


def descend(
    name: str, problem: str, loss: Loss, optimum: torch.Tensor, options: argparse.Namespace
) -> list[float]:
    """Train by one method; ``||X_k - 1 x*^T|| / sqrt(n) ||x*||`` after k = 0, 1, … steps."""
    algorithm, graph, part = METHODS[name]
    x = torch.nn.Parameter(torch.zeros(UNKNOWNS, dtype=torch.float64))
    rate = part * (options.rate or RATES[problem])
    optimizer = bf.DistributedOptimizer(
        torch.optim.SGD([x], lr=rate), torch.nn.ParameterList([x]), algorithm, topology=graph
    )
    if algorithm == "push_sum":
        optimizer.force_barrier = True  # else nobody waits, and each run ends elsewhere
    squares = [float((x.detach() - optimum).square().sum())]
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss(x).backward()
        optimizer.step()
        squares.append(float((x.detach() - optimum).square().sum()))
    optimizer.close()
    mean = bf.allreduce(torch.tensor(squares, dtype=torch.float64))
    errors: list[float] = (mean.sqrt() / optimum.norm()).tolist()
    if bf.rank() == 0:
        print(f"{problem:14} {name:34} error {errors[0]:.2f} -> {errors[-1]:.1e}", flush=True)
    return errors


def show_table(problem: str, curves: dict[str, list[float]]) -> None:
    """One line for each method, and the sentence that they prove."""
    steps = len(curves["push_sum"]) - 1
    title = f"{problem}: distance from the optimum, {bf.size()} ranks"
    table = Table("", title=title, title_justify="left")
    looks = sorted({steps // 10, steps // 3, steps})
    for column in (*(f"{step} steps" for step in looks), "in theory"):
        table.add_column(column, justify="right")
    for name, errors in curves.items():
        theory = "exact" if ALGORITHMS[METHODS[name][0]].exact else "biased"
        table.add_row(name, *(f"{errors[step]:.1e}" for step in looks), theory)
    Console(width=100).print(table)
    whole, half, exact = (errors[-1] for errors in list(curves.values())[:3])
    print(
        f"Plain diffusion ends {whole:.1e} from the optimum, {whole / half:.1f} times as far as "
        f"with half the rate; exact diffusion {exact:.0e}.\n"
    )


def save_picture(found: dict[str, dict[str, list[float]]], out: Path) -> None:
    """The distance over steps, a panel for each problem."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found) + 1, 3.6), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (problem, curves) in zip(panels, found.items(), strict=True):
        for number, (name, errors) in enumerate(curves.items()):
            style = "--" if METHODS[name][1] is directed else "-"
            where = (5 * number, max(1, len(errors) // 8))  # markers, for lines on each other
            look = {"color": f"C{number}", "marker": "os^vDP"[number], "markevery": where}
            axes.semilogy(errors, style, label=name, linewidth=1.2, markersize=4, **look)
        axes.set(xlabel="step", title=problem, ylim=(1e-17, 3))
    panels[0].set_ylabel("distance from the optimum")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(out, dpi=100)


def parse_options() -> argparse.Namespace:
    """What can be chosen on the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("optimization.py", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--problem", nargs="+", choices=list(RATES), default=list(RATES), help="which (all)")
    add("--steps", type=int, default=400, help="of each method (default: %(default)s)")
    add("--rate", type=float, help="step size (default: 0.1 for least_squares, 0.5 for logistic)")
    add("--ranks", type=int, default=4, help="threads, without a launcher (default: %(default)s)")
    add("--out", type=Path, help="picture: png, svg or pdf")
    add("--smoke", action="store_true", help="a few steps, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.steps = 40
    for name, least in (("steps", 1), ("ranks", 2)):
        if (got := getattr(options, name)) < least:
            parser.error(f"argument --{name}: expected at least {least}, got {got}")
    if options.rate is not None and not options.rate > 0:
        parser.error(f"argument --rate: expected a number above 0, got {options.rate}")
    return options


if __name__ == "__main__":
    main()
