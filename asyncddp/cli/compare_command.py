"""``asyncddp compare``: compares algorithms on simulated ranks, as a table and a plot."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncddp.cli.compare_report import show, write_files
from asyncddp.cli.main import click_errors
from asyncddp.cli.options import (
    IntegerParamType,
    NumberParamType,
    add_options,
    rank_value,
)
from asyncddp.cli.topology_options import (
    FAMILY_OPTIONS,
    LINK_OPTIONS,
    build_topology,
    check_options,
    find_builder,
)

if TYPE_CHECKING:
    from asyncddp.simulate import MethodComparison, Problem, Scenario
    from asyncddp.topology import GraphOrSchedule, Link

_COUNT = IntegerParamType()
_REAL, _POSITIVE = NumberParamType(), NumberParamType(positive=True)
_FILE = click.Path(path_type=Path, dir_okay=False)
_PROBLEM_OPTIONS = (
    click.option("--problem", type=click.Choice(["digits", "least_squares"]), default="digits",
                 help="What to train: scikit-learn's digits, or least squares [digits]."),
    click.option("-n", "--ranks", type=_COUNT, metavar="N", default=16, help="Virtual ranks [16]."),
    click.option("--alpha", type=_POSITIVE, metavar="X",
                 help="digits: Dirichlet(X) labels of a rank; 0.1 differs much [all alike]."),
    click.option("--labels-per-rank", type=_COUNT, metavar="N",
                 help="digits: instead, about N of the ten labels a rank; 1 differs most."),
    click.option("--batch-size", type=_COUNT, metavar="N", default=16,
                 help="digits: of a rank [16]."),
    click.option("--steps", type=_COUNT, metavar="N", default=300, help="Of each rank [300]."),
    click.option("--optimizer", metavar="NAME", default="SGD", help="Of torch.optim [SGD]."),
    click.option("--lr", type=_POSITIVE, metavar="X", default=0.1, help="Step size [0.1]."),
    click.option("--momentum", type=_REAL, metavar="X", help="For optimizers that have it [0]."),
    click.option("--every", type=_COUNT, metavar="N", help="Steps to a record [steps / 50]."),
)  # fmt: skip
_SCENARIO_OPTIONS = (
    click.option("--step-time", type=_POSITIVE, metavar="MS", default=10.0,
                 help="Of gradients and update, without messages [10]."),
    click.option("--megabytes", type=_POSITIVE, metavar="MB",
                 help="Bytes and seconds as if the model had this size [its own]."),
    click.option("--slow", type=rank_value("RANK:FACTOR", "3:10", float), multiple=True,
                 metavar="RANK:FACTOR",
                 help="Takes longer by this factor: 3:10; repeatable."),
    click.option("--leave", type=rank_value("RANK:STEP", "5:100", int), multiple=True,
                 metavar="RANK:STEP",
                 help="Leaves after so many steps, as by join: 5:100; repeatable."),
    click.option("--asynchronous", is_flag=True,
                 help="Let ranks go on at their own pace, with methods that wait for nobody."),
    click.option("--loss", type=_REAL, metavar="P", default=0.0,
                 help="Probability that a message is lost [0]."),
    click.option("--retransmit", type=_POSITIVE, metavar="MS",
                 help="After which a lost message is sent again, as by TCP [it is gone]."),
)  # fmt: skip


@click.command("compare")
@click.argument("methods", nargs=-1, required=True, metavar="METHOD…")
@click.option("--topology", "graph_name", metavar="NAME", help="See asyncddp topology [default].")
@add_options(*_PROBLEM_OPTIONS, *_SCENARIO_OPTIONS, *LINK_OPTIONS, *FAMILY_OPTIONS)
@click.option("--plot", type=_FILE, metavar="FILE", help="Write the curves: compare.png, .svg.")
@click.option("--csv", "table_file", type=_FILE, metavar="FILE", help="Write all records.")
def compare_command(
    methods: tuple[str, ...],
    graph_name: str | None,
    problem: str,
    ranks: int,
    steps: int,
    every: int | None,
    plot: Path | None,
    table_file: Path | None,
    **given: Any,
) -> None:
    """Train one model by several methods on virtual ranks, all in this process, and compare them.

    \b
      asyncddp compare adapt_then_combine gradient_allreduce
      asyncddp compare adapt_then_combine choco_sgd:compression=sign --topology ring
      asyncddp compare diloco gradient_tracking adapt_then_combine --topology base_k \\
          --ranks 64 --alpha 0.1 --link 100Mbit,20ms --megabytes 100 --plot compare.png

    A METHOD is what DistributedOptimizer(algorithm=…) takes, with its settings after a colon:
    NAME:key=value,key=value. All start from the same model and see the same batches, by the same
    classes that real ranks run. Losses and distances are computed; seconds are a model: each step
    takes --step-time on each rank, and messages the latency and bandwidth of --link.

    With --ranks-per-machine ranks share machines, and a method that averages between those, such as
    choco_sgd:hierarchical=True or, of most methods,
    NAME:communication=hierarchical_neighbor_allreduce, has a --topology of machines: of --ranks
    over --ranks-per-machine nodes. For all others its nodes are ranks.

    \b
      asyncddp compare adapt_then_combine choco_sgd:hierarchical=True --topology ring \\
          --ranks 16 --ranks-per-machine 4

    Take --alpha or --labels-per-rank where ranks hold different data: methods that are not exact
    are biased there, as the distance between ranks shows. Take --megabytes for the size of your own
    model, since the one that is trained here is small. A method that cannot live with the topology,
    or momentum for one that has its own, is named at the end, with what it needs.
    """  # noqa: D301 - click reads the \b
    for file in (plot, table_file):
        _check_folder(file)
    with click_errors():
        parsed = [_parsed(one) for one in methods]  # before torch is loaded, which takes a while
        given_graph = {name: given.pop(name) for name in _family_names() if name in given}
        topologies = _RequestedTopologies(graph_name, given_graph)
        scenario = _scenario_of(given)
        found = _compare(
            parsed,
            _problem_of(problem, ranks, given_graph["seed"] or 0, given),
            _optimizer_options(given),
            steps,
            topology=topologies.build if graph_name else None,
            scenario=scenario,
            record_every=every or max(1, steps // 50),
            seed=given_graph["seed"] or 0,
        )
        title = f"{found.problem}{topologies.describe(ranks)}"
        show(found, title, scenario)
        write_files(found, title, plot, table_file)
    if found.refused:
        reasons = [f"{name}: {reason}" for name, reason in found.refused.items()]
        raise click.ClickException("\n  ".join(reasons))


def _check_folder(file: Path | None) -> None:
    """Raise for an output file that could not be written at the end."""
    if file is not None and not file.absolute().parent.is_dir():
        raise click.ClickException(f"There is no folder {file.parent} for {file.name}; make it.")


def _family_names() -> Sequence[str]:
    """Return the names of all parameters of all graphs and schedules."""
    from asyncddp.topology import GRAPHS, SCHEDULES
    from asyncddp.topology.builders import parameters_of

    every = [parameters_of(builder) for builder in {**GRAPHS, **SCHEDULES}.values()]
    return sorted({name for parameters in every for name in parameters} | {"seed"})


class _RequestedTopologies:
    """Builder of the graph requested by ``--topology``, for ranks or for machines.

    Args:
        name: Value of --topology; None for the methods' own.
        given: The options of graphs and schedules.

    Raises:
        click.UsageError: There is none of that name, or it has no such option.
    """

    def __init__(self, name: str | None, given: dict[str, Any]) -> None:
        self._builder = None if name is None else find_builder(name, "--topology")
        self._built: dict[int, GraphOrSchedule] = {}
        self._options = {key: value for key, value in given.items() if value is not None}
        wrong = [key for key in self._options if key != "seed"]
        if name is not None and self._builder is not None:
            check_options(wrong, {name: self._builder})
        elif wrong:
            raise click.UsageError(f"--{wrong[0]} belongs to a topology: name it by --topology.")

    def build(self, nodes: int) -> GraphOrSchedule:
        """Return the graph for a number of nodes; build it once."""
        if nodes not in self._built:
            assert self._builder is not None
            self._built[nodes] = build_topology(self._builder, nodes, self._options)
        return self._built[nodes]

    def describe(self, ranks: int) -> str:
        """Return a description of the graphs built so far, for a title."""
        from asyncddp.topology import describe

        if self._builder is None:
            return ", each method's own topology"
        return "".join(
            f", {describe(graph)}{'' if nodes == ranks else ' of machines'}"
            for nodes, graph in sorted(self._built.items(), reverse=True)
        )


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``NAME:key=value,key=value``."""
    from asyncddp.algorithms import ALGORITHMS

    name, _, rest = text.partition(":")
    ALGORITHMS.location_of(name)  # which raises if there is none
    settings: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        key, separator, value = part.partition("=")
        if not separator:
            raise click.BadParameter(
                f"expected NAME:key=value,key=value, got {text!r}.", param_hint="METHOD"
            )
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = value
    return name, settings


def _scenario_of(given: dict[str, Any]) -> Scenario:
    from asyncddp.simulate import Scenario
    from asyncddp.topology import Links

    link: Link = given["link"]
    megabytes, again = given["megabytes"], given["retransmit"]
    return Scenario(
        step_seconds=given["step_time"] / 1000,
        slowdown=dict(given["slow"]),
        departures=dict(given["leave"]),
        links=Links(link, given["ranks_per_machine"], given["link_inside"]),
        loss=given["loss"],
        retransmit_after=None if again is None else again / 1000,
        asynchronous=given["asynchronous"],
        model_bytes=None if megabytes is None else 1e6 * megabytes,
    )


def _problem_of(name: str, ranks: int, seed: int, given: dict[str, Any]) -> Problem:
    from asyncddp import simulate

    shared_out = {name: given[name] for name in ("alpha", "labels_per_rank")}
    if name == "digits":
        return simulate.digits(ranks, batch_size=given["batch_size"], seed=seed, **shared_out)
    for option, value in shared_out.items():
        if value is not None:
            raise click.UsageError(
                f"--{option.replace('_', '-')} shares labels out; least squares has none. "
                "Leave it out."
            )
    return simulate.least_squares(ranks, seed=seed)


def _optimizer_options(given: dict[str, Any]) -> dict[str, Any]:
    options = {"name": given["optimizer"], "lr": given["lr"]}
    return options if given["momentum"] is None else {**options, "momentum": given["momentum"]}


def _compare(
    methods: list[tuple[str, dict[str, Any]]],
    problem: Problem,
    optimizer: dict[str, Any],
    steps: int,
    **settings: Any,
) -> MethodComparison:
    from asyncddp import simulate

    factory = simulate.optimizer_named(**optimizer)
    with _progress(methods, steps) as progress:
        return simulate.compare(
            problem, methods, factory, steps=steps, progress=progress, **settings
        )


@contextlib.contextmanager
def _progress(
    methods: list[tuple[str, dict[str, Any]]], steps: int
) -> Iterator[Callable[[str, int], None]]:
    """Show a progress bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(methods) * steps)
        made = 0

        def advance(name: str, step: int) -> None:
            nonlocal made
            made += 1
            bar.update(task, completed=made, description=name)

        yield advance
