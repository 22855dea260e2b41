"""``asyncddp topology``: compares graphs and time-varying schedules by consensus rate and cost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from asyncddp.cli.console import make_console, make_table
from asyncddp.cli.options import IntegerParamType, LinkParamType, NumberParamType, add_options
from asyncddp.registry import nearest

if TYPE_CHECKING:
    from rich.table import Table

    from topology import GraphOrSchedule, Link, Links

    Builder: TypeAlias = Callable[..., GraphOrSchedule]

_COUNT, _NATURAL = IntegerParamType(), IntegerParamType(least=0)
_ANY, _REAL = IntegerParamType(least=None), NumberParamType()
_FAMILY_OPTIONS = (
    click.option("--shape", metavar="RxC", help="Rows and columns of a grid: 4x8."),
    click.option("--degree", type=_COUNT, metavar="N", help="Neighbours in random graphs [4]."),
    click.option("--base", type=_ANY, metavar="N", help="Exponential graphs: powers of it."),
    click.option("-k", "--peers", "k", type=_COUNT, metavar="N", help="base_k: most peers [1]."),
    click.option("--local-size", type=_COUNT, metavar="N", help="Ranks per machine [4]."),
    click.option("--seed", type=_NATURAL, metavar="N", help="Of random graphs [0]."),
    click.option("--budget", type=_REAL, metavar="X", help="matcha: part of links used [0.5]."),
    click.option("--graph", metavar="NAME", help="What one_peer_of and matcha thin out [ring]."),
    click.option("--center", type=_NATURAL, metavar="RANK", help="Middle of a star."),
    click.option("--style", metavar="STYLE", help="ring: both, left or right."),
    click.option(
        "--undirected", "directed", flag_value=False, default=None, help="equi_*: symmetric."
    ),
    click.option("--eta", type=_REAL, metavar="X", help="equi_dynamic: how much it mixes [0.5]."),
)
_COST_OPTIONS = (
    click.option("--megabytes", type=_REAL, metavar="MB", default=100.0, help="Model size [100]."),
    click.option("--link", type=LinkParamType(), metavar="RATE,LATENCY", default="10Gbit,50us",
                 help="Between machines [10Gbit,50us]."),
    click.option("--ranks-per-machine", type=_COUNT, metavar="N", default=1,
                 help="That share a machine's link [1]."),
    click.option("--link-inside", type=LinkParamType(), metavar="RATE,LATENCY",
                 default="80Gbit,2us", help="Of a rank, inside its machine [80Gbit,2us]."),
)  # fmt: skip
_DEFAULTS: Mapping[str, Any] = {
    "degree": 4, "k": 1, "local_size": 4, "seed": 0, "budget": 0.5, "graph": "ring",
}  # fmt: skip


@click.command("topology")
@click.argument("names", nargs=-1, metavar="[NAME]…")
@click.option("-n", "--ranks", type=_ANY, metavar="N", default=8, help="Number of ranks [8].")
@click.option(
    "--draw", type=click.Path(path_type=Path), metavar="FILE", help="Write a picture: graph.png."
)
@add_options(*_FAMILY_OPTIONS, *_COST_OPTIONS)
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
    import topology
    from topology import GRAPHS, SCHEDULES

    console = make_console()
    if not names:
        console.print(_list_families(GRAPHS, "Graphs"))
        console.print(_list_families(SCHEDULES, "Schedules"))
        console.print("[dim]asyncddp topology NAME… -n RANKS compares them.[/]")
        return
    builders = {name: _find_builder(name, "NAME") for name in names}
    options = {name: value for name, value in given.items() if value is not None}
    _check_options(options, builders)
    built, refused = {}, []
    for name, builder in builders.items():
        try:
            built[name] = _build(builder, ranks, options)
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
    except (topology.TopologyError, ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if refused:
        raise click.ClickException("\n  ".join(refused))


def _find_builder(name: str, parameter: str) -> Builder:
    from topology import GRAPHS, SCHEDULES

    known: Mapping[str, Builder] = GRAPHS if parameter == "--graph" else {**GRAPHS, **SCHEDULES}
    if name in known:
        return known[name]
    raise click.BadParameter(
        f"unknown graph or schedule {name!r}; known are: {', '.join(sorted(known))}."
        f"{nearest(name, known)}",
        param_hint=parameter,
    )


def _parameters(builder: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    every = inspect.signature(builder).parameters
    return {name: parameter for name, parameter in every.items() if name != "n"}


def _check_options(options: Iterable[str], builders: Mapping[str, Builder]) -> None:
    """Raise if an option is a parameter of none of the named families."""
    from topology import GRAPHS, SCHEDULES

    taken = {name for builder in builders.values() for name in _parameters(builder)}
    if "graph" in taken:
        taken |= {name for builder in GRAPHS.values() for name in _parameters(builder)}
    for name in options:
        if name not in taken:
            families = {**GRAPHS, **SCHEDULES}.items()
            takers = sorted(family for family, builder in families if name in _parameters(builder))
            flag = {"k": "-k", "directed": "--undirected"}.get(name, "--" + name.replace("_", "-"))
            raise click.UsageError(
                f"{flag} means nothing to {', '.join(builders)}; it belongs to {', '.join(takers)}."
            )


def _build(builder: Builder, n: int, options: Mapping[str, Any]) -> GraphOrSchedule:
    arguments: dict[str, Any] = {
        name: options.get(name, _DEFAULTS.get(name))
        for name, parameter in _parameters(builder).items()
        if name in options or parameter.default is parameter.empty
    }
    if "shape" in arguments:
        sides = arguments["shape"].split("x")
        arguments["shape"] = tuple(int(side) if side.isdecimal() else side for side in sides)
    if "graph" not in arguments:
        return builder(n, **arguments)
    thinned = _build(_find_builder(arguments.pop("graph"), "--graph"), n, options)
    return builder(thinned, **arguments)


def _draw(built: Mapping[str, GraphOrSchedule], draw: Path) -> None:
    import topology

    for name, graph in built.items():
        path = draw if len(built) == 1 else draw.with_name(f"{draw.stem}-{name}{draw.suffix}")
        topology.draw(graph).savefig(path)
        click.echo(f"Wrote {path}.")


def _list_families(builders: Mapping[str, Builder], title: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "options", "", title=title, title_justify="left", box=None)
    for name, builder in builders.items():
        options = ", ".join(_parameters(builder))
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
    import topology

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
    from topology import Schedule, describe

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
