"""A table, a sentence and a picture of trainings beside a slow rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from support.trial import Trial

__all__ = ["save_picture", "show_table", "summary"]

# Okabe and Ito's colours, which the colour-blind tell apart as well.
_STYLES = (("#D55E00", "-"), ("#56B4E9", "--"), ("#0072B2", "-"), ("#009E73", ":"))
_NAMES = {"ddp": "DDP (gloo)"}


def show_table(trials: Sequence[Trial], target: float) -> None:
    """One column for each training."""
    table = Table(title="What each method made of its time", title_justify="left")
    table.add_column("")
    for trial in trials:
        table.add_column(_name(trial), justify="right")
    fast, slow = zip(*(trial.rates for trial in trials), strict=True)
    table.add_row("steps per second", *(f"{rate:.1f}" for rate in fast))
    table.add_row("… of the slow rank", *(f"{rate:.1f}" for rate in slow))
    table.add_row("accuracy at the end", *(f"{trial.accuracy:.1f} %" for trial in trials))
    table.add_row(f"seconds to {target:g} %", *(_moment(trial, target) for trial in trials))
    Console(width=80).print(table)


def _name(trial: Trial) -> str:
    return _NAMES.get(trial.method, trial.method)


def _moment(trial: Trial, target: float) -> str:
    """When the target was reached, in seconds."""
    moment = trial.reached(target)
    return "never" if moment is None else f"{moment:.1f}"


def summary(trials: Sequence[Trial], target: float, slower: float) -> str:
    """What these trainings have shown, in one sentence; others are compared with the first."""
    first, size = trials[0], len(trials[0].ends)
    beside = (
        f"With one of {size} ranks {slower:g} times slower" if slower > 1 else f"On {size} ranks"
    )
    shown = f"{beside}, the average model reaches {target:g} % accuracy " + ", ".join(
        f"{_when(trial, target)} with {_name(trial)}" for trial in trials
    )
    best = min(trials, key=lambda trial: _or_never(trial.reached(target)))
    soonest = best.reached(target)
    if len(trials) == 1 or soonest is None:
        return f"{shown}."
    if best is first:
        return f"{shown}: none is faster than {_name(first)}."
    compared = first.reached(target)
    times = (
        "first" if compared is None else f"{compared / soonest:.1f} times as fast as {_name(first)}"
    )
    rates = f"{best.rates[0]:.1f} steps per second instead of {first.rates[0]:.1f}"
    return f"{shown}: {_name(best)} is {times}, at {rates}."


def _or_never(moment: float | None) -> float:
    return float("inf") if moment is None else moment


def _when(trial: Trial, target: float) -> str:
    if trial.reached(target) is None:
        return f"not within {trial.seconds:.0f} s"
    return f"after {_moment(trial, target)} s"


def save_picture(trials: Sequence[Trial], target: float, says: str, path: Path) -> None:
    """Accuracy over time and steps per second; the sentence is the file's description."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 12}
    with mpl.rc_context({**settings, "axes.titlelocation": "left", "axes.titlesize": 12}):
        end = max(trial.seconds for trial in trials)
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        accuracy, speed = figure.subplots(1, 2, width_ratios=(2.3, 1))
        accuracy.axhline(target, color="0.6", linewidth=1, linestyle=(0, (5, 4)))
        for number, (trial, (colour, style)) in enumerate(zip(trials, _STYLES, strict=False)):
            times, heights = zip(*trial.curve, strict=True)
            accuracy.plot(times, heights, style, color=colour, linewidth=2, label=_name(trial))
            reached = trial.reached(target)
            if reached is not None:
                accuracy.plot((reached, reached), (0, target), color=colour, linewidth=1)
                accuracy.plot(reached, target, "o", color=colour, markersize=7, zorder=3)
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
                words, height = f"{_moment(trial, target)} s", 3 + 8 * number
                accuracy.text(reached + end / 150, height, words, color=colour, bbox=box)
            places = [place + 0.27 * (number - (len(trials) - 1) / 2) for place in (0, 1)]
            bars = speed.bar(places, trial.rates, width=0.25, color=colour)
            speed.bar_label(bars, fmt="%.1f", padding=2, fontsize=10)
        accuracy.set(xlabel="seconds", xlim=(0, end), ylim=(0, 100))
        accuracy.set_title("accuracy of the average model on test images, %")
        size = len(trials[0].ends)
        speed.set_title("steps per second")
        speed.set_xticks((0, 1), (f"the other {size - 1} ranks", "the slow rank"))
        speed.margins(y=0.1)
        figure.legend(loc="outside lower center", ncols=len(trials), frameon=False)
        field = "Subject" if path.suffix == ".pdf" else "Description"
        figure.savefig(path, dpi=150, metadata={field: says})
