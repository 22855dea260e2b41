"""The pictures of scripts/bench can be read: no tick's label lies on another's."""

from __future__ import annotations

from itertools import combinations

import pytest
from matplotlib.figure import Figure

from tests.examples.test_bench_methods import measurement
from tests.examples.test_bench_network import measured
from tests.support.processes import REPO


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "scripts"))


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, in order."""
    found = []
    save = Figure.savefig

    def kept(figure, *arguments, **options):
        found.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    return found


def colliding(figure):
    """Pairs of labels of an axis that lie on each other, as drawn."""
    found = []
    for axes in figure.findobj(lambda artist: hasattr(artist, "xaxis")):
        for axis, low, high in (
            (axes.xaxis, *sorted(axes.get_xlim())),
            (axes.yaxis, *sorted(axes.get_ylim())),
        ):
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            labels = [
                tick.label1
                for tick in ticks
                if tick.label1.get_text() and low <= tick.get_loc() <= high
            ]
            assert labels, "an axis without labels"
            places = [(label.get_text(), label.get_window_extent()) for label in labels]
            found += [
                (a, b) for (a, one), (b, other) in combinations(places, 2) if one.overlaps(other)
            ]
    return found


def test_labels_that_collide_are_found():
    """What the tests below look for, made on purpose."""
    figure = Figure(figsize=(2, 1))
    figure.subplots().set_xticks([0.5, 0.51], ["256 MB", "257 MB"])
    figure.draw_without_rendering()
    assert colliding(figure) == [("256 MB", "257 MB")]


def test_tables_over_many_sizes_and_with_long_names(tmp_path, figures):
    """4 B to 256 MB, in columns beside bars whose names are long."""
    from benchmarks.plots import save_plot
    from benchmarks.tables import Rival, TimingRow, TimingTable

    sizes = [4 << (2 * k) for k in range(14)]
    names = ("asyncddp", "mpi4py: Sendrecv + lerp", "limit: local lerp")
    bars = ("local step", "DDP gloo, gradient_as_bucket_view", "adapt_then_combine in backward")
    tables, rows = [], []
    for key, over, rivals in (("a", sizes, names), ("b", [4], bars), ("c", [4], bars)):
        made = [Rival(name, lambda nbytes: lambda number: None) for name in rivals]
        tables.append(TimingTable(key, "a title of some length " * 3, over, made))
        rows += [
            TimingRow(key, name, size, 1, (1e-6 * (100 + size / 4e3),) * 2)
            for name in rivals
            for size in over
        ]
    save_plot(tmp_path / "out.png", tables, rows, "caption")
    (figure,) = figures
    assert colliding(figure) == []


def test_methods_over_links(tmp_path, figures):
    """Ratios over several decades on a logarithmic axis."""
    from benchmarks.network.methods.methods_plot import draw

    found = [
        measurement(
            "100mbit",
            ddp=900,
            free=80,
            bytegrad=400,
            slowed={"ddp": 2000, "free": 85, "bytegrad": 900},
        ),
        measurement("1gbit", ddp=90, free=50, bytegrad=250),
        measurement("1gbit", 0.02, ddp=600, free=60, bytegrad=700),
    ]
    draw(tmp_path / "out.png", found)
    (figure,) = figures
    assert len(figure.axes) == 4
    figure.axes[3].set_visible(False)
    assert colliding(figure) == []


def test_steps_between_hosts(tmp_path, figures):
    """Groups of bars; what they are stands below, on none of them."""
    from benchmarks.network.steps.step_plot import draw

    draw(tmp_path / "out.png", [measured(n, local=200, ddp=600, awc=380) for n in (2, 4, 8)])
    (figure,) = figures
    assert colliding(figure) == []
    (legend,) = figure.legends
    assert not legend.get_window_extent().overlaps(figure.axes[0].get_window_extent())


def test_bytes_over_ranks(tmp_path, figures):
    """To 100,000 ranks."""
    from benchmarks.scale.bench import compute_model_costs
    from benchmarks.scale.scale_plot import draw

    model = compute_model_costs((2, 64, 1024), 1 << 20, lambda text: None)
    last = type(model[0])(100_000, model[-1].costs)
    draw(tmp_path / "out.png", [], [*model, last], 1 << 20)
    (figure,) = figures
    assert colliding(figure) == []


def test_averages_beside_their_predictions(tmp_path, figures):
    """A line for each average and network."""
    from benchmarks.network.cost.averages import CostMeasurement
    from benchmarks.network.cost.bench import NETWORKS
    from benchmarks.network.cost.cost_plot import draw
    from benchmarks.tables import TimingRow

    rivals = {"one-peer": "plain sockets", "ring": "asyncddp", "allreduce": "gloo"}
    rows = [TimingRow(name, by, 1 << 20, 1, (0.1, 0.1)) for name, by in rivals.items()]
    draw(tmp_path / "out.png", [CostMeasurement(one, rows, {}, {}) for one in NETWORKS])
    (figure,) = figures
    assert colliding(figure) == []
