"""What is trained with which options, how often, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from benchmarks.network.host_network import HostNetwork
from benchmarks.network.host_runs import run_on_hosts
from benchmarks.subprocess_runs import on_this_machine, run_for_json

__all__ = ["Result", "Training", "train"]

_PROGRAM = "one_to_n.gpt_rank"


@dataclass(frozen=True)
class Training:
    """A training: how the tables call it, on how many ranks, and the example's options."""

    label: str
    ranks: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """What one training measured, once for each seed: the records of ``examples/gpt.py``."""

    training: Training
    runs: tuple[list[dict[str, Any]], ...]

    def last(self, key: str) -> list[float]:
        """Return a figure of the end, of each seed."""
        return [float(run[-1][key]) for run in self.runs]

    def told(self, key: str, form: str = ".2f") -> str:
        """Return the mean over seeds, and their standard deviation where there are several."""
        return _told(self.last(key), form)

    def told_over(self, key: str, first: Sequence[float], form: str = ".3f") -> str:
        """Return the same of the ratio to another training's figure with the same seed."""
        return _told(
            [mine / other for mine, other in zip(self.last(key), first, strict=True)], form
        )

    def curve(self, key: str) -> tuple[list[float], list[float], list[float], list[float]]:
        """Return ``key``, and the seeds' lowest, mean and highest perplexity, point by point."""
        points = list(zip(*self.runs, strict=False))
        found = [[float(one["perplexity"]) for one in point] for point in points]
        along = [mean(float(one[key]) for one in point) for point in points]
        return along, [*map(min, found)], [*map(mean, found)], [*map(max, found)]


def _told(found: Sequence[float], form: str) -> str:
    spread = f" ±{stdev(found):{form}}" if len(found) > 1 else ""
    return f"{mean(found):{form}}{spread}"


def train(
    training: Training,
    seeds: Sequence[int],
    advance: Callable[[str], None],
    network: HostNetwork | None = None,
) -> Result:
    """Train once for each seed, on ranks of this machine or on hosts made for it.

    Raises:
        RunFailedError: A run failed; the message has its last output.
    """
    runs = []
    for seed in seeds:
        words = [*training.words, "--seed", str(seed)]
        advance(f"{training.label}, seed {seed}")
        if network is None:
            launch = on_this_machine(training.ranks, _PROGRAM, *words)
            found = run_for_json(launch, environ={"OMP_NUM_THREADS": "1"})
        else:
            found = run_on_hosts(
                network, _PROGRAM, [*words, "--interface", "e0"], lambda line: None
            )
        runs.append(found["records"])
    return Result(training, tuple(runs))
