"""Pictures: what is in them, and that they can be written."""

from __future__ import annotations

import pytest

from asyncddp import topology
from tests.topology.graph_cases import label

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

from matplotlib.collections import LineCollection, PathCollection
from matplotlib.patches import FancyArrowPatch


def parts(axes):
    """Numbers of lines, arrows, nodes and labels."""
    lines = [c for c in axes.collections if isinstance(c, LineCollection)]
    nodes = [c for c in axes.collections if isinstance(c, PathCollection)]
    return (
        sum(len(c.get_segments()) for c in lines),
        sum(isinstance(p, FancyArrowPatch) for p in axes.patches),
        sum(len(c.get_offsets()) for c in nodes),
        len(axes.texts),
    )


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (topology.ring(6), (6, 0, 6, 6)),
        (topology.ring(6, "right"), (0, 6, 6, 6)),
        (topology.exponential_two(8), (4, 16, 8, 8)),
        (topology.star(5), (4, 0, 5, 5)),
        (topology.push_weights(topology.star(3)), (0, 4, 3, 3)),
        (topology.ring(1), (0, 0, 1, 1)),
        (topology.ring(2), (1, 0, 2, 2)),
        (topology.hypercube(128), (448, 0, 128, 0)),
        (topology.exponential_two(256), (1920, 0, 256, 0)),
    ],
    ids=label,
)
def test_graph_has_lines_for_equal_weights_and_arrows_for_the_rest(graph, expected, tmp_path):
    """Edges of equal weight both ways are lines, others arrows; large graphs lack labels."""
    figure = topology.draw(graph)
    assert len(figure.axes) == 1
    assert parts(figure.axes[0]) == expected
    assert figure.get_suptitle() == topology.describe(graph)
    figure.savefig(tmp_path / "graph.png")
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")


def test_schedule_is_a_strip_of_rounds(tmp_path):
    """A schedule is drawn as one panel for each round of its period."""
    figure = topology.draw(topology.base_k(5, 1))
    assert [axes.get_title() for axes in figure.axes] == [f"round {k}" for k in range(5)]
    assert [parts(axes)[0] for axes in figure.axes] == [2, 2, 2, 2, 2]
    assert figure.get_supxlabel() == "one period, which then repeats"
    for name in ("strip.png", "strip.svg", "strip.pdf"):
        figure.savefig(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 2000


def test_long_and_endless_schedules_show_their_first_rounds():
    """Without a period 8 rounds are drawn, else as many as asked, and the caption says so."""
    endless = topology.draw(topology.equi_dynamic(6, seed=0))
    assert len(endless.axes) == 8
    assert endless.get_supxlabel() == "the first 8 rounds of a schedule that never repeats"
    some = topology.draw(topology.base_k(5, 1), rounds=3)
    assert len(some.axes) == 3
    assert some.get_supxlabel() == "the first 3 of 5 rounds, which then repeat"


def test_wider_lines_are_greater_weights_and_red_ones_negative():
    """A line's width grows with the weight's magnitude; positive is blue, negative red."""
    graph = topology.from_adjacency([[0.7, 0.5, -0.2], [0.5, 0.5, 0.0], [-0.2, 0.0, 1.2]])
    lines = next(c for c in topology.draw(graph).axes[0].collections)
    strong, negative = lines.get_linewidths()
    assert strong > 1.5 * negative
    blue, red = lines.get_colors()
    assert blue[2] > blue[0]
    assert red[0] > red[2]
