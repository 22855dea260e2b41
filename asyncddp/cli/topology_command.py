"""``asyncddp topology``: compares graphs and time-varying schedules by consensus rate and cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from asyncddp.cli.console import make_console, make_table, writing
from asyncddp.cli.options import IntegerParamType, NumberParamType, add_options
from asyncddp.cli.topology_options import (
    FAMILY_OPTIONS,
    LINK_OPTIONS,
    build_topology,
    check_options,
    find_builder,
)

if TYPE_CHECKING:
    from rich.table import Table

    from asyncddp.topology import GraphOrSchedule, Link, Links

    Builder: TypeAlias = Callable[..., GraphOrSchedule]


@click.command("topology")
@click.argument("names", nargs=-1, metavar="[NAME]…")
@add_options(
    click.option("-n", "--ranks", type=IntegerParamType(least=None), metavar="N", default=8,
                 help="Number of ranks [8]."),
    click.option("--draw", type=click.Path(path_type=Path), metavar="FILE",
                 help="Write a picture: graph.png."),
    *FAMILY_OPTIONS,
    click.option("--megabytes", type=NumberParamType(), metavar="MB", default=100.0,
                 help="Model size [100]."),
    *LINK_OPTIONS,
)  # fmt: skip
def topology_command(
    names: tuple[str, ...],
    ranks: int,
    draw: Path | None,
    megabytes: float,
    link: Link,
    ranks_per_machine: int,
    link_inside: Link,
    **given: Any,
) -> None:
    """Show how fast graphs and schedules mix, and what a step costs; without NAME, list them.

    \b
      asyncddp topology
      asyncddp topology exponential_two ring one_peer_exponential -n 16
      asyncddp topology base_k -k 2 -n 12 --draw base_k.png

    A graph is the same in every step; a schedule gives a rank other neighbours in every round.
    The consensus rate is the factor by which the ranks' distance to their average shrinks per
    step: 0 is exact at once, 1 is never. A schedule that is exact after L steps needs no more.
    One message per step and few steps are what to look for.
    """  # noqa: D301 - click reads the \b
    from asyncddp import topology
    from asyncddp.topology import GRAPHS, SCHEDULES

    console = make_console()
    if not names:
        console.print(_list_families(GRAPHS, "Graphs"))
        console.print(_list_families(SCHEDULES, "Schedules"))
        console.print("[dim]asyncddp topology NAME… -n RANKS compares them.[/]")
        return
    builders = {name: find_builder(name, "NAME") for name in names}
    options = {name: value for name, value in given.items() if value is not None}
    check_options(options, builders)
    built, refused = {}, []
    for name, builder in builders.items():
        try:
            built[name] = build_topology(builder, ranks, options)
        except topology.TopologyError as error:
            refused.append(str(error))
    nbytes, links = 1e6 * megabytes, topology.Links(link, ranks_per_machine, link_inside)
    try:
        if built:
            console.print(_comparison_table(built, ranks, nbytes, links))
            console.print(
                _legend(nbytes, links) + _random_schedule_legend(built.values()), highlight=False
            )
        if draw:
            _draw(built, draw)
    except (topology.TopologyError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    if refused:
        raise click.ClickException("\n  ".join(refused))


def _draw(built: Mapping[str, GraphOrSchedule], draw: Path) -> None:
    from asyncddp import topology

    for name, graph in built.items():
        path = draw if len(built) == 1 else draw.with_name(f"{draw.stem}-{name}{draw.suffix}")
        picture = topology.draw(graph)
        with writing("--draw", path):
            picture.savefig(path)


def _list_families(builders: Mapping[str, Builder], title: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    from asyncddp.topology.builders import parameters_of

    table = Table("name", "options", "", title=title, title_justify="left", box=None)
    for name, builder in builders.items():
        options = ", ".join(parameters_of(builder))
        table.add_row(Text(name, "bold cyan"), options, (builder.__doc__ or "").partition("\n")[0])
    return table


def _comparison_table(
    built: Mapping[str, GraphOrSchedule], n: int, nbytes: float, links: Links
) -> Table:
    from rich.text import Text

    table = make_table(f"{n} rank{'s'[: n != 1]}", [
        "graph or schedule", "sends", "doubly\nstoch.", "sym-\nmetric", "rate", "gap",
        "lowest\neigenv.", "exact\nafter", "time",
    ])  # fmt: skip
    names = table.columns[0]
    names.justify, names.no_wrap, names.overflow, names.min_width = "left", False, "fold", 12
    for graph in built.values():
        name, *figures = _figures(graph, nbytes, links)
        table.add_row(Text(name, "bold cyan"), *figures)
    return table


def _figures(graph: GraphOrSchedule, nbytes: float, links: Links) -> list[str]:
    from asyncddp import topology

    cost = topology.communication_cost(graph, nbytes, links)
    whole = cost.ring_allreduce.seconds
    exact = topology.finite_time_length(graph)
    return [
        topology.describe(graph),
        f"{cost.neighbors.messages_per_rank:.3g}",
        "yes" if topology.is_doubly_stochastic(graph) else "[yellow]no[/]",
        "yes" if topology.is_symmetric(graph) else "no",
        f"{topology.consensus_rate(graph):.6g}",
        f"{topology.spectral_gap(graph):.4g}",
        f"{round(topology.min_eigenvalue(graph), 4) + 0.0:.4f}",
        "-" if exact is None else f"[green]{exact}[/]",
        f"{cost.neighbors.seconds / whole:.2f}" if whole else "-",
    ]


def _legend(nbytes: float, links: Links) -> str:
    size = links.ranks_per_machine
    shared = f"; {size} ranks per machine, inside it {links.inside}" if size > 1 else ""
    return f"""[dim]\
sends       messages of the busiest rank per step
rate, gap   consensus rate and spectral gap, of a schedule per round
lowest      smallest real part of an eigenvalue; some methods need it above -1/3
exact       steps after which every rank holds the average itself
time        of a step, relative to a ring allreduce: {nbytes / 1e6:g} MB, {links.between}\
{shared}[/]"""


def _random_schedule_legend(graphs: Iterable[GraphOrSchedule]) -> str:
    from asyncddp.topology import Schedule, describe

    names = [describe(g) for g in graphs if isinstance(g, Schedule) and g.period is None]
    if not names:
        return ""
    text = f"""
[dim]{", ".join(names)}: rounds are drawn from the seed and never repeat
rate        of the product of the first 16 rounds, per round: the most by which a distance shrinks
gap         1 - |second eigenvalue| of that product, per round; not 1 - rate, since a product of
            symmetric rounds is not symmetric"""
    if any(name.startswith("matcha(") for name in names):
        text += """
budget      matcha splits the links into matchings, in which no rank has two, and uses each at
            random; --budget is the part of them that a round uses on average: 0.5 halves the
            messages, and rate and gap say what that costs"""
    return text + "[/]"
