"""A table and a picture of trainings for the same wall time, with and without a straggler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

__all__ = ["Mark", "Trial", "save_picture", "show_table"]

# Okabe and Ito's colours, which the colour-blind tell apart as well.
_STYLES = (("#56B4E9", "--"), ("#E69F00", "--"), ("#0072B2", "-"), ("#D55E00", "-"))
_BINS = (("0", 0), ("1", 1), ("2–3", 2), ("4–15", 4), ("16–63", 16), ("64+", 64))  # noqa: RUF001


@dataclass(frozen=True)
class Mark:
    """One rank's model some seconds after the start."""

    seconds: float
    parameters: torch.Tensor


@dataclass(frozen=True)
class Trial:
    """One training.

    Attributes:
        title: What it is called.
        rates: Steps per second of each rank.
        curve: Seconds, and the average model's accuracy on the test images in per cent.
        ages: For each rank, how often what it mixed was so many steps behind its own.
    """

    title: str
    rates: list[float]
    curve: list[tuple[float, float]]
    ages: list[Counter[int]]

    @property
    def accuracy(self) -> float:
        """Of the average model, at the end."""
        return self.curve[-1][1]


def show_table(trials: Sequence[Trial], straggler: int) -> None:
    """One column for each training, one row for each rank's speed."""
    table = Table(
        title="Steps per second; accuracy of the average model; median of steps behind",
        title_justify="left",
    )
    table.add_column("")
    for trial in trials:
        table.add_column(trial.title, justify="right")
    for rank in range(len(trials[0].rates)):
        name = f"rank {rank}, straggler" if rank == straggler else f"rank {rank}"
        table.add_row(name, *(f"{trial.rates[rank]:.1f} /s" for trial in trials))
    table.add_section()
    table.add_row("average model", *(f"{trial.accuracy:.1f} %" for trial in trials), style="bold")
    table.add_row("steps behind", *(_median(trial) for trial in trials))
    Console(width=80).print(table)


def _median(trial: Trial) -> str:
    """Of how far neighbours were behind, where neighbours were not waited for."""
    ages = sorted(sum(trial.ages, Counter()).elements())
    return str(ages[len(ages) // 2]) if ages else "0, waits"


def save_picture(trials: Sequence[Trial], straggler: int, path: Path) -> None:
    """Speed of each rank, accuracy over wall time, and how far behind the mixed models were."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        speed, accuracy, age = figure.subplots(1, 3)
        for number, (trial, (colour, style)) in enumerate(zip(trials, _STYLES, strict=True)):
            places = [rank + 0.2 * (number - 1.5) for rank in range(len(trial.rates))]
            speed.bar(places, trial.rates, width=0.18, color=colour, label=trial.title)
            accuracy.plot(*zip(*trial.curve, strict=True), style, color=colour)
        speed.set(xlabel=f"rank ({straggler} is the straggler)", ylabel="steps per second")
        speed.set_xticks(range(len(trials[0].rates)))
        accuracy.set(xlabel="seconds", ylabel="accuracy of the average model, %")
        for number, index in enumerate((1, 3)):
            shares = _shares(sum(trials[index].ages, Counter()))
            places = [place + 0.4 * (number - 0.5) for place in range(len(_BINS))]
            age.bar(places, shares, width=0.36, color=_STYLES[index][0])
        age.set(xlabel="steps behind", ylabel="of all models mixed, %")
        age.set_xticks(range(len(_BINS)), [name for name, _ in _BINS])
        figure.legend(loc="outside upper center", ncols=len(trials), frameon=False)
        figure.savefig(path, dpi=150)


def _shares(ages: Counter[int]) -> list[float]:
    """Per cent in each bin."""
    total = max(1, sum(ages.values()))
    starts = [start for _, start in _BINS]
    ends = [*starts[1:], float("inf")]
    return [
        100 * sum(count for age, count in ages.items() if start <= age < end) / total
        for start, end in zip(starts, ends, strict=True)
    ]
