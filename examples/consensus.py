"""Average consensus: each rank holds a vector, and all want the average, by neighbours alone.

    asyncddp run -np 8 examples/consensus.py
    torchrun --nproc-per-node 8 examples/consensus.py --topology ring exponential_two
    python examples/consensus.py --ranks 16 --out consensus.png      # ranks are threads

A round replaces a rank's vector by a weighted mean of its own and its neighbours',
``x_i <- sum_j w_ij x_j``. Where the rows and columns of W sum to one the average never changes, and
the distance from it shrinks by a factor of at most rho = ||W - 11^T / n|| a round: theory says
before a message is sent how good a graph is. The table has this rate beside the one measured.

With ``--asynchronous`` nobody waits, and the last rank is three times as slow. A rank keeps a share
of its vector and adds the others to its neighbours' windows, whenever it likes (push-sum). The sum
over ranks and windows stays what it was, and so does that of the weights p, which are given away in
the same shares: x / p tends to the average. Predictions in the table are for synchronous rounds.

BlueFog's counterpart is its example pytorch_average_consensus.py.
"""

from __future__ import annotations

import argparse
import math
import random
import textwrap
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import asyncddp as bf
from asyncddp import topology

TOPOLOGIES = ("ring", "grid_2d", "exponential_two", "one_peer_exponential", "base_k")
EXACT = 1e-12  # an error up to here is rounding
SLOWER = 3  # the last rank's pauses, in those of others, where nobody waits


@dataclass(frozen=True)
class Run:
    """What came of one graph or schedule."""

    name: str
    sends: float  # vectors that a rank sends in a round, on average
    rate: float  # by which the error shrinks in a round at least, as theory has it
    errors: list[float]  # ||X_k - 1 mean^T|| / ||X_0 - 1 mean^T|| after k = 0, 1, … rounds
    predicted: list[float]  # the same as a product of the matrices of synchronous rounds

    @property
    def exact_after(self) -> int | None:
        """Rounds after which the error was rounding; None where it never was."""
        return next((k for k, error in enumerate(self.errors) if error <= EXACT), None)

    @property
    def measured_rate(self) -> float:
        """The factor of a round, over the second half of those before the error is rounding."""
        if self.exact_after and self.rate == 0:
            return 0.0
        last = max(k for k, error in enumerate(self.errors) if error > EXACT)
        shrunk = self.errors[last] / self.errors[last // 2]
        return math.pow(shrunk, 1 / max(1, last - last // 2))


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
    """Average over each graph, then say and draw what came of it."""
    runs = [average_over(name, options) for name in options.topology]
    if bf.rank() == 0:
        show_table(runs)
        if options.out:
            save_picture(runs, options)
            print(f"The picture is {options.out}.")


def average_over(name: str, options: argparse.Namespace) -> Run:
    """Start from random vectors and average over one graph, with theory beside it."""
    bf.set_topology(name)  # the same on all ranks
    own = torch.Generator().manual_seed(bf.rank())
    x = torch.randn(options.elements, generator=own, dtype=torch.float64)
    starts = bf.allgather(x[None]).numpy()  # one row for each rank, for theory alone
    found, remark = (push_sum if options.asynchronous else synchronous)(x, options)
    squares = bf.allreduce(torch.tensor(found, dtype=torch.float64))
    errors = (squares / squares[0]).sqrt().tolist()

    graph, rounds = bf.load_topology(), range(options.rounds)
    schedule = topology.as_schedule(graph)  # a graph is a schedule whose rounds are all the same
    sends = [len(schedule.neighbors(r, k).dst_ranks) for r in range(bf.size()) for k in rounds]
    predicted = topology.consensus_error(graph, options.rounds, starts) ** 0.5  # W ⋯ W X
    rate = topology.consensus_rate(graph)
    if bf.rank() == 0:
        print(f"{name:28} error 1 -> {errors[-1]:.1e}, {remark}", flush=True)
    return Run(name, sum(sends) / len(sends), rate, errors, predicted.tolist())


def synchronous(x: torch.Tensor, options: argparse.Namespace) -> tuple[list[float], str]:
    """Average with the neighbours, round by round; this rank's squared distance after each."""
    average = bf.allreduce(x)
    squares = [float((x - average).square().sum())]
    for k in range(options.rounds):
        x = bf.neighbor_allreduce(x, round=k)  # a schedule has other neighbours in each round
        squares.append(float((x - average).square().sum()))
    return squares, f"{options.rounds} rounds"


def push_sum(x: torch.Tensor, options: argparse.Namespace) -> tuple[list[float], str]:
    """Give shares away without waiting; this rank's squared distance after each ``--pause``."""
    average, total = bf.allreduce(x), bf.allreduce(x, average=False)
    schedule = topology.as_schedule(bf.load_topology())
    pause = options.pause * (SLOWER if bf.rank() == bf.size() - 1 else 1)
    chance = random.Random(bf.rank())
    squares: list[float] = []
    bf.win_create(x, "x", zero_init=True, associated_p=True)  # buffers that neighbours add to
    begun = time.monotonic()
    for k in count():
        now = (time.monotonic() - begun) / options.pause
        mine = float((x / bf.win_associated_p("x") - average).square().sum())
        squares += [mine] * (min(int(now), options.rounds) + 1 - len(squares))
        if now >= options.rounds:
            break
        peers = schedule.neighbors(bf.rank(), k).dst_ranks
        share = 1 / (len(peers) + 1)
        bf.win_accumulate(x, "x", share, dict.fromkeys(peers, share), require_mutex=True)
        time.sleep(pause * chance.uniform(0.5, 1.5))  # as if it computed
        bf.win_update_then_collect("x")  # adds what has come, and leaves the buffers at zero
    bf.barrier()
    bf.win_update_then_collect("x")  # what came after the last look
    drift = float((bf.allreduce(x, average=False) - total).abs().max())
    p = float(bf.allreduce(torch.tensor(bf.win_associated_p("x"), dtype=torch.float64)))
    bf.win_free("x")
    return squares, f"{k} rounds of rank 0, sum changed by {drift:.0e}, mean p {p:.12f}"


def show_table(runs: list[Run]) -> None:
    """One line for each graph, and a sentence."""
    table = Table("", title=f"Average consensus of {bf.size()} ranks", title_justify="left")
    for column in ("sends a round", "rate predicted", "rate measured", "error", "exact after"):
        table.add_column(column, justify="right")
    for run in runs:
        exact = f"{run.exact_after} rounds" if run.exact_after else "never"
        rates = f"{run.rate:.3f}", f"{run.measured_rate:.3f}"
        table.add_row(run.name, f"{run.sends:.3g}", *rates, f"{run.errors[-1]:.1e}", exact)
    Console(width=100).print(table)
    best = min(runs, key=lambda run: (run.exact_after or 1e9, round(run.errors[-1], 12)))
    after = best.exact_after or len(best.errors) - 1
    print(f"Nearest to the average: {best.name}, error {best.errors[after]:.0e} in {after} rounds.")


def save_picture(runs: list[Run], options: argparse.Namespace) -> None:
    """The error over rounds: points are measured, lines are predicted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(runs):
        color, marker = f"C{number}", "osD^vP*X"[number % 8]
        axes.semilogy(run.errors, marker, color=color, label=run.name, markersize=4)
        axes.semilogy([max(error, 1e-17) for error in run.predicted], color=color, linewidth=0.9)
    how = "asynchronous, with a slow rank" if options.asynchronous else "synchronous"
    axes.set(xlabel="round", ylabel="distance from the average", ylim=(1e-17, 3))
    axes.set_title(f"{bf.size()} ranks, {how}; lines: predicted for synchronous rounds", fontsize=9)
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(options.out, dpi=100)


def parse_options() -> argparse.Namespace:
    """What can be chosen on the command line."""
    known = sorted({**topology.GRAPHS, **topology.SCHEDULES})
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("consensus.py", description=__doc__, formatter_class=raw)
    names = f"NAME is one of {', '.join(known)}; `asyncddp topology` shows them."
    parser.epilog = textwrap.fill(names, 100, break_on_hyphens=False)
    add = parser.add_argument
    add("--topology", nargs="+", choices=known, default=TOPOLOGIES, metavar="NAME", help="which")
    add("--asynchronous", action="store_true", help="by push-sum in windows; nobody waits")
    add("--rounds", type=int, default=30, help="of averaging (default: %(default)s)")
    add("--elements", type=int, default=1000, help="of each rank's vector (default: %(default)s)")
    add("--pause", type=float, default=0.02, help="seconds of an asynchronous round (%(default)s)")
    add("--ranks", type=int, default=8, help="threads, without a launcher (default: %(default)s)")
    add("--out", type=Path, help="picture: png, svg or pdf")
    add("--smoke", action="store_true", help="a few rounds, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.elements, options.pause = 6, 10, 0.01
    for name, least in (("rounds", 1), ("elements", 1), ("pause", 1e-4), ("ranks", 2)):
        if (got := getattr(options, name)) < least:
            parser.error(f"argument --{name}: expected at least {least}, got {got}")
    return options


if __name__ == "__main__":
    main()
