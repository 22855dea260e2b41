"""Command-line options that select a graph or schedule, and the construction of that graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from asyncddp.cli.options import LINK, IntegerParamType, NumberParamType
from asyncddp.registry import nearest

if TYPE_CHECKING:
    from asyncddp.topology import GraphOrSchedule

    Builder: TypeAlias = Callable[..., GraphOrSchedule]

_COUNT, _NATURAL = IntegerParamType(), IntegerParamType(least=0)
_ANY, _REAL = IntegerParamType(least=None), NumberParamType()
FAMILY_OPTIONS = (
    click.option("--shape", metavar="RxC", help="Rows and columns of a grid: 4x8."),
    click.option("--degree", type=_COUNT, metavar="N", help="Neighbours in random graphs [4]."),
    click.option("--base", type=_ANY, metavar="N", help="Exponential graphs: powers of it."),
    click.option("-k", "--peers", "k", type=_COUNT, metavar="N", help="base_k: most peers [1]."),
    click.option("--local-size", type=_COUNT, metavar="N", help="Ranks per machine [4]."),
    click.option("--seed", type=_NATURAL, metavar="N", help="Of random graphs [0]."),
    click.option("--budget", type=_REAL, metavar="X", help="matcha: part of links used [0.5]."),
    click.option("--graph", metavar="NAME", help="What one_peer_of, matcha … thin out [ring]."),
    click.option("--center", type=_NATURAL, metavar="RANK", help="Middle of a star."),
    click.option("--style", metavar="STYLE", help="ring: both, left or right."),
    click.option("--undirected", "directed", flag_value=False, default=None,
                 help="equi_*: symmetric."),
    click.option("--eta", type=_REAL, metavar="X", help="equi_dynamic: how much it mixes [0.5]."),
)  # fmt: skip
"""Parameters of graphs and schedules, as options of a command."""
LINK_OPTIONS = (
    click.option("--link", type=LINK, metavar="RATE,LATENCY", default="10Gbit,50us",
                 help="Between machines [10Gbit,50us]."),
    click.option("--ranks-per-machine", type=_COUNT, metavar="N", default=1,
                 help="That share a machine's link [1]."),
    click.option("--link-inside", type=LINK, metavar="RATE,LATENCY",
                 default="80Gbit,2us", help="Of a rank, inside its machine [80Gbit,2us]."),
)  # fmt: skip
"""Links between ranks, as options of a command."""


def find_builder(name: str, parameter: str) -> Builder:
    """Return the builder of a graph or schedule by name; errors name the option ``parameter``.

    Raises:
        click.BadParameter: There is none of that name.
    """
    from asyncddp.topology import GRAPHS, SCHEDULES

    known: Mapping[str, Builder] = GRAPHS if parameter == "--graph" else {**GRAPHS, **SCHEDULES}
    if name in known:
        return known[name]
    raise click.BadParameter(
        f"unknown graph or schedule {name!r}; known are: {', '.join(sorted(known))}."
        f"{nearest(name, known)}",
        param_hint=parameter,
    )


def check_options(options: Iterable[str], builders: Mapping[str, Builder]) -> None:
    """Raise if an option is a parameter of none of the given graphs and schedules."""
    from asyncddp.topology import GRAPHS, SCHEDULES
    from asyncddp.topology.builders import parameters_of

    taken = {name for builder in builders.values() for name in parameters_of(builder)}
    if "graph" in taken:
        taken |= {name for builder in GRAPHS.values() for name in parameters_of(builder)}
    for name in options:
        if name not in taken:
            families = {**GRAPHS, **SCHEDULES}.items()
            takers = sorted(key for key, builder in families if name in parameters_of(builder))
            flag = {"k": "-k", "directed": "--undirected"}.get(name, "--" + name.replace("_", "-"))
            raise click.UsageError(
                f"{flag} means nothing to {', '.join(builders)}; it belongs to {', '.join(takers)}."
            )


def build_topology(builder: Builder, n: int, options: Mapping[str, Any]) -> GraphOrSchedule:
    """Build a graph or schedule for n ranks, from the options that apply to it.

    Raises:
        topology.TopologyError: The family has none of that kind.
    """
    from asyncddp.topology.builders import build

    if "graph" in options:
        find_builder(options["graph"], "--graph")
    return build(builder, n, options)
