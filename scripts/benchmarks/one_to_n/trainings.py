"""What is trained with which options, how often, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from benchmarks.network.hosts import HostNetwork, run_on_hosts
from benchmarks.ranks import Advance, run_on_ranks

SEEDS = 3
_PROGRAM = "one_to_n.gpt_rank:train"


class Training(NamedTuple):
    """A training: how the tables call it, on how many ranks, and the example's options.

    ``{seed}`` in the options stands for the seed.
    """

    label: str
    ranks: int
    words: str


class Result(NamedTuple):
    """What one training measured, once for each seed: the records of ``examples/gpt.py``."""

    training: Training
    runs: list[list[dict[str, Any]]]

    def last(self, key: str) -> list[float]:
        """Return a figure of the end, of each seed."""
        return [float(run[-1][key]) for run in self.runs]

    def told(self, key: str) -> str:
        """Return the mean over seeds, and their standard deviation where there are several."""
        return _told(self.last(key), ".2f")

    def told_over(self, key: str, first: Sequence[float]) -> str:
        """Return the same of the ratio to another training's figure with the same seed."""
        pairs = zip(self.last(key), first, strict=True)
        return _told([mine / other for mine, other in pairs], ".3f")

    def told_after(self, nbytes: float) -> tuple[str, str]:
        """Return perplexity and steps at the last evaluation with so many bytes sent at most."""
        within = [[one for one in run if one["bytes"] <= nbytes] for run in self.runs]
        if not all(within):
            return "-", "0"
        found = [float(run[-1]["perplexity"]) for run in within]
        return _told(found, ".2f"), f"{mean(run[-1]['step'] for run in within):.0f}"

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
    seeds: int,
    advance: Advance,
    network: HostNetwork | None = None,
    **layers: float,
) -> Result:
    """Train once for each seed, on ranks of this machine or on hosts made for it.

    Raises:
        RunFailedError: A run failed; the message has its last output.
    """
    runs = []
    for seed in range(seeds):
        words = training.words.replace("{seed}", str(seed))
        given = {"words": [*words.split(), "--seed", str(seed)], **layers}
        advance(f"{training.label}, seed {seed}")
        if network is None:
            alone = {"OMP_NUM_THREADS": "1"}
            found = run_on_ranks(training.ranks, _PROGRAM, given, environ=alone)
        else:
            found = run_on_hosts(network, _PROGRAM, {**given, "interface": "e0"})
        runs.append(found["records"])
    return Result(training, runs)
