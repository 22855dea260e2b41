"""``network-gpt``: seconds and bytes until a GPT on 4 hosts is as good as on one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

from benchmarks.machine_info import machine_facts
from benchmarks.network.hosts import HostNetwork, check_hosts
from benchmarks.one_to_n.trainings import SEEDS, Result, Training, train
from benchmarks.ranks import Advance
from benchmarks.report import BenchFigures, BenchOptions
from benchmarks.tables import FigureRow, FigureTable

_HOSTS = 4
_ACCELERATOR = 0.060  # seconds of a step in which a rank's processor is free
_SLOWER = 4.0
_EVERY = "--evaluate-every 10"


class _Place(NamedTuple):
    """Links, and how much slower the last rank is."""

    title: str
    network: HostNetwork
    slower: float = 1.0


_PLACES = (
    _Place("1 Gbit/s", HostNetwork(_HOSTS, "1gbit")),
    _Place("100 Mbit/s", HostNetwork(_HOSTS, "100mbit")),
    _Place("100 Mbit/s, one slow rank", HostNetwork(_HOSTS, "100mbit"), _SLOWER),
)
_METHODS: Mapping[str, str] = {
    "ddp": "--method ddp",
    "gradient_allreduce": "--method gradient_allreduce",
    "adapt_with_combine": "--method adapt_with_combine",
    "choco_sgd, sign": "--method choco_sgd --compression sign",
    "local_sgd, H = 10": "--method local_sgd --every 10",
    "diloco, H = 10": "--method diloco --every 10 --set outer_lr=0.5 --set outer_momentum=0.5",
    "win_put": "--method win_put",
}
_BY_THE_CLOCK = ("win_put",)
_TOLERANCE = 1.01
_LADDER = (1.0, 1.2, 1.4, 1.6, 2.0, 2.5)  # times the one process's steps
_CLOCK = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)  # times ddp's seconds
_STEPS, _QUICK_STEPS = 200, 8
_QUICK = ("ddp", "adapt_with_combine")
_COLUMNS = ("method", "steps", "seconds", "÷ ddp's", "MB sent by a rank", "÷ ddp's", "perplexity")


_NOTE = (
    "Hosts are network namespaces that share this machine's cores. A rank's layers sleep "
    f"{1000 * _ACCELERATOR:.0f} ms a step, as an accelerator computes while the processor is "
    f"free, and those of the slow rank {_SLOWER:g} times as long. Each method makes the fewest "
    "steps, of 1 to 2.5 times those of one process, after which its average model is as good "
    "within 1 %, in the mean of the seeds; asynchronous ones train by the clock, for the shortest "
    "of some times. Steps are rank 0's. Mean and standard deviation of the seeds."
)


@dataclass(frozen=True)
class _Bench:
    """What all trainings share: each seed's perplexity to reach, and how much is trained."""

    targets: Sequence[float]
    steps: int
    advance: Advance

    def _is_enough(self, found: Result) -> bool:
        pairs = zip(found.last("perplexity"), self.targets, strict=True)
        return mean(one / target for one, target in pairs) <= _TOLERANCE

    def steps_needed(self, method: str) -> int:
        """Return the fewest steps of the ladder by whose end the average model is as good."""
        for times in _LADDER:
            steps = round(times * self.steps)
            words = f"{_METHODS[method]} --steps {steps} --evaluate-every {steps}"
            training = Training(method, _HOSTS, words)
            if self._is_enough(train(training, len(self.targets), self.advance)):
                break
        return steps

    def on_hosts(self, method: str, place: _Place, words: str) -> Result:
        """Train between hosts whose layers take time."""
        training = Training(method, 1, f"{_METHODS[method]} {words} {_EVERY}")
        layers = {"accelerator": _ACCELERATOR, "slower": place.slower}

        def advance(text: str) -> None:
            self.advance(f"{place.title}, {text}")

        return train(training, len(self.targets), advance, place.network, **layers)

    def by_the_clock(self, method: str, place: _Place, seconds: float) -> Result:
        """Train by the clock: the shortest time, of those tried, that is enough."""
        for share in _CLOCK:
            found = self.on_hosts(method, place, f"--seconds {share * seconds:.1f}")
            if self._is_enough(found):
                break
        return found

    def at(self, place: _Place, needed: Mapping[str, int]) -> list[Result]:
        """Train with every method at one place; ddp first, which sets the clock of the others."""
        results = [self.on_hosts(name, place, f"--steps {steps}") for name, steps in needed.items()]
        seconds = mean(results[0].last("seconds"))
        clocked = () if self.steps == _QUICK_STEPS else _BY_THE_CLOCK
        return [*results, *(self.by_the_clock(one, place, seconds) for one in clocked)]


def _lines(results: Sequence[Result]) -> Iterator[FigureRow]:
    """Yield a line for each method: what it took, beside what ddp took."""
    times = results[0].last("seconds")
    sent = [mean(one.last("bytes")) for one in results]
    for one, nbytes in zip(results, sent, strict=True):
        yield FigureRow(
            (
                one.training.label,
                f"{mean(one.last('step')):.0f}",
                one.told("seconds"),
                one.told_over("seconds", times),
                f"{nbytes / 1e6:.1f}",
                f"{nbytes / sent[0]:.3f}",
                one.told("perplexity"),
            )
        )


def figures(options: BenchOptions, advance: Advance) -> BenchFigures:
    """Train everything that this bench shows.

    Raises:
        RunFailedError: Hosts cannot be made here, or a run on them failed.
    """
    from benchmarks.one_to_n.learning_plot import save_picture

    check_hosts()
    steps, seeds = (_QUICK_STEPS, 1) if options.quick else (_STEPS, SEEDS)
    words = f"--method alone --steps {steps} {_EVERY}"
    alone = train(Training("one process", 1, words), seeds, advance)
    bench = _Bench(alone.last("perplexity"), steps, advance)
    names = _QUICK if options.quick else [one for one in _METHODS if one not in _BY_THE_CLOCK]
    needed = {name: steps if options.quick else bench.steps_needed(name) for name in names}
    places = _PLACES[:1] if options.quick else _PLACES
    tables: list[FigureTable] = []
    panels = []
    for place in places:
        results = bench.at(place, needed)
        title = f"to perplexity {alone.told('perplexity')}, 4 hosts, {place.title}"
        lines, note = [*_lines(results)], "" if tables else _NOTE
        tables.append(FigureTable(f"gpt_{place.title}", title, _COLUMNS, lines, note))
        panels.append((place.title, results, "seconds", True))
    return BenchFigures(machine_facts(), tables, lambda path: save_picture(path, panels))
