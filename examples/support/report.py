"""A progress line, a table and a picture of trainings that are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["Point", "Run", "progress_line", "save_picture", "show_table"]

# Okabe and Ito's colours, which the colour-blind tell apart as well.
_STYLES = (("#D55E00", "-"), ("#0072B2", "--"), ("#009E73", ":"))


@dataclass(frozen=True)
class Point:
    """The average model after some steps.

    Attributes:
        loss: Cross-entropy over the training images of all ranks.
        accuracy: Per cent of the test images.
        distance: Root mean square distance of the ranks' models from the average model.
    """

    step: int
    loss: float
    accuracy: float
    distance: float


@dataclass
class Run:
    """One training with one method."""

    algorithm: str
    points: list[Point] = field(default_factory=list)
    own_accuracies: list[float] = field(default_factory=list)
    bytes_per_step: float = 0.0

    @property
    def accuracy(self) -> float:
        """Of the average model, at the end."""
        return self.points[-1].accuracy


@contextmanager
def progress_line(title: str, steps: int, *, shown: bool) -> Iterator[Callable[[Point], None]]:
    """A live line for one training; gives a function that moves it on."""
    text = "loss {task.fields[loss]:.3f}  accuracy {task.fields[accuracy]:.1f} %"
    columns = (
        TextColumn("{task.description:20}"),
        BarColumn(14),
        MofNCompleteColumn(),
        TextColumn(text),
        TimeElapsedColumn(),
    )
    with Progress(*columns, disable=not shown, auto_refresh=False) as progress:
        task = progress.add_task(title, total=steps, loss=0.0, accuracy=0.0)

        def report(point: Point) -> None:
            shares = {"loss": point.loss, "accuracy": point.accuracy}
            progress.update(task, completed=point.step, refresh=True, **shares)

        yield report


def show_table(runs: Sequence[Run], classes: Sequence[Sequence[int]]) -> None:
    """One column for each training, with the ranks' own models first; the last has one rank."""
    together = runs[:-1]
    title = "Accuracy on test images of all ten digits; the one rank was trained on all"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.algorithm, justify="right")
    for rank, seen in enumerate(classes):
        shown = " ".join(map(str, seen)) if len(classes) > 1 else "all"
        name = f"rank {rank}, saw {shown}"
        table.add_row(name, *(f"{run.own_accuracies[rank]:.1f} %" for run in together))
    table.add_section()
    table.add_row("average model", *(f"{run.accuracy:.1f} %" for run in runs), style="bold")
    table.add_row("consensus distance", *(f"{run.points[-1].distance:.2g}" for run in together))
    table.add_row("sent per rank, step", *(f"{run.bytes_per_step:,.0f} B" for run in runs))
    Console(width=80).print(table)


def save_picture(runs: Sequence[Run], path: Path) -> None:
    """Loss, accuracy and consensus distance over the steps, one panel each."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = {
        "loss": "training loss of the average model",
        "accuracy": "test accuracy of the average model, %",
        "distance": "consensus distance",
    }
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12, 3.8), layout="constrained")
        by_name = dict(zip(panels, figure.subplots(1, len(panels)), strict=True))
        for name, axes in by_name.items():
            shown = runs[:-1] if name == "distance" else runs
            for run, (color, line) in zip(shown, _STYLES, strict=False):
                steps = [point.step for point in run.points]
                values = [getattr(point, name) for point in run.points]
                axes.plot(steps, values, line, color=color, linewidth=1.8, label=run.algorithm)
            axes.set_title(panels[name], loc="left", fontsize=11)
            axes.set(xlabel="step", xlim=(0, runs[0].points[-1].step))
            axes.grid(color="0.9", linewidth=0.6)
        by_name["loss"].set_yscale("log")
        by_name["loss"].yaxis.set_major_formatter("{x:g}")
        by_name["accuracy"].set_ylim(max(0, min(run.accuracy for run in runs) - 15), 100)
        handles, labels = by_name["loss"].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, dpi=150)
