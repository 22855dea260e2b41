"""``one-to-n``: a GPT on one process and on many, at equal tokens; figures of the guide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.machine_info import machine_facts
from benchmarks.one_to_n.learning_plot import save_picture
from benchmarks.one_to_n.trainings import Result, Training, train
from benchmarks.standalone_command import BenchFigures, BenchOptions, command, finished
from benchmarks.tables import FigureRow

__all__ = ["main"]

_SEEDS = 3
_QUICK = ("--smoke", "--steps", "8", "--evaluate-every", "4")
_RANKS = (1, 2, 4, 8)
_RATES = (0.004, 0.008, 0.016)
_OUTER = ((1.0, 0.0), (0.5, 0.5), (0.7, 0.5), (0.2, 0.8), (0.4, 0.9), (0.7, 0.9))
_SHORT_OUTER = "--set outer_lr=0.5 --set outer_momentum=0.5"  # for tens of rounds
_STREAMING = "--method streaming_diloco --every 5 --set fragments=4"  # the model in 20
_INTERVALS = (10, 40)
_LONG = 600  # steps of the trainings of methods that communicate rarely


def _of(label: str, words: str, ranks: int = 4) -> Training:
    return Training(label, ranks, ("--evaluate-every", "20", *words.split()))


_EQUAL_TOKENS = (
    _of("one process", "--method alone", 1),
    _of("ddp", "--method ddp"),
    _of("gradient_allreduce", "--method gradient_allreduce"),
    _of("adapt_then_combine", "--method adapt_then_combine"),
    _of("adapt_with_combine", "--method adapt_with_combine"),
    _of("choco_sgd, sign", "--method choco_sgd --compression sign"),
    _of("bytegrad", "--method bytegrad"),
    _of("local_sgd, H = 10", "--method local_sgd --every 10"),
    _of("diloco, H = 10", f"--method diloco --every 10 {_SHORT_OUTER}"),
    _of("noloco, H = 10", f"--method noloco --every 10 {_SHORT_OUTER}"),
    _of("one rank alone", "--method alone"),
)
_DIFFERENT_DATA = tuple(
    _of(label, f"--split contiguous {words}")
    for label, words in {
        "gradient_allreduce": "--method gradient_allreduce",
        "adapt_then_combine": "--method adapt_then_combine",
        "gradient_tracking": "--method gradient_tracking",
        "choco_sgd, sign": "--method choco_sgd --compression sign",
        "local_sgd, H = 10": "--method local_sgd --every 10",
        "diloco, H = 10": f"--method diloco --every 10 {_SHORT_OUTER}",
        "one rank alone": "--method alone",
    }.items()
)
_RARELY = tuple(
    _of(label, f"--steps {_LONG} --evaluate-every 50 {words}")
    for label, words in {
        "ddp": "--method ddp",
        "local_sgd, H = 20": "--method local_sgd --every 20",
        "diloco, H = 20, by default": "--method diloco --every 20",
        "diloco, H = 20": f"--method diloco --every 20 {_SHORT_OUTER}",
        "streaming_diloco, H = 20": f"{_STREAMING} {_SHORT_OUTER}",
        "noloco, H = 20": f"--method noloco --every 20 {_SHORT_OUTER}",
    }.items()
)
_AVERAGES = tuple(
    _of(f"every {steps} steps", f"--set num_steps_per_communication={steps}")
    for steps in (1, 2, 5, 10, 20, 50)
)


@dataclass(frozen=True)
class _Runner:
    """Trains for all sheets, shortly where it was asked."""

    quick: bool
    advance: Callable[[str], None]

    def all_of(self, trainings: Sequence[Training], seeds: int = _SEEDS) -> list[Result]:
        """Train each with several seeds; quickly the last of them, with one."""
        if not self.quick:
            return [train(one, range(seeds), self.advance) for one in trainings]
        short = [Training(one.label, one.ranks, (*one.words, *_QUICK)) for one in trainings[-1:]]
        return [train(one, range(1), self.advance) for one in short]


def _learnt(results: Sequence[Result]) -> Iterator[FigureRow]:
    """Yield a line for each training: how good its models are, and what it has sent."""
    first = results[0].last("perplexity")
    for one in results:
        yield FigureRow(
            (
                one.training.label,
                one.told("perplexity"),
                one.told_over("perplexity", first),
                one.told("ema"),
                one.told("own"),
                f"{mean(one.last('distance')):.2g}",
                f"{mean(one.last('bytes')) / 1e6:.1f}",
            )
        )


_LEARNT = ("method", "perplexity", "÷ the first's", "EMA", "one replica", "distance", "MB sent")


def _grid(
    runner: _Runner,
    make: Callable[[object, object], Training],
    rows: Sequence[object],
    columns: Sequence[object],
) -> Iterator[FigureRow]:
    """Yield a line for each row: perplexities over the columns, of one seed."""
    for row in rows[-1:] if runner.quick else rows:
        found = runner.all_of([make(row, column) for column in columns], seeds=1)
        cells = [one.told("perplexity") for one in found]
        yield FigureRow((str(row), *cells, *[""] * (len(columns) - len(cells))))


def _added_ranks(method: str) -> Callable[[object, object], Training]:
    def make(ranks: object, rate: object) -> Training:
        words = f"--method {method} --batch {8 * int(str(ranks))} --lr {rate} --evaluate-every 200"
        return _of(f"{method}, {ranks} ranks, {rate}", words, int(str(ranks)))

    return make


def _outer(interval: object, outer: object) -> Training:
    assert isinstance(outer, tuple)
    words = f"--method diloco --every {interval} --steps 400 --evaluate-every 400"
    words += f" --set outer_lr={outer[0]} --set outer_momentum={outer[1]}"
    return _of(f"diloco, H = {interval}, {outer}", words)


def figures(options: BenchOptions, advance: Callable[[str], None]) -> BenchFigures:
    """Train everything that this bench shows."""
    runner = _Runner(options.quick, advance)
    equal, different = map(runner.all_of, (_EQUAL_TOKENS, _DIFFERENT_DATA))
    sheets = [
        finished("equal_tokens", _EQUAL, _LEARNT, [*_learnt(equal)], _NOTE),
        finished("different_data", _DIFFERENT, _LEARNT, [*_learnt(different)]),
    ]
    for method in ("gradient_allreduce", "adapt_then_combine"):
        lines = [*_grid(runner, _added_ranks(method), _RANKS, _RATES)]
        columns = ("ranks", *(f"step size {rate}" for rate in _RATES))
        title = f"perplexity of {method}, 200 steps of 8 sequences a rank"
        sheets.append(finished(f"ranks_{method}", title, columns, lines))
    averages = runner.all_of(_AVERAGES, seeds=1)
    sheets.append(finished("averages", _AVERAGED, _LEARNT, [*_learnt(averages)]))
    lines = [*_grid(runner, _outer, _INTERVALS, _OUTER)]
    columns = ("H", *(f"η = {rate}, μ = {momentum}" for rate, momentum in _OUTER))
    sheets.append(finished("outer", _OUTER_STEPS, columns, lines))
    rarely = runner.all_of(_RARELY)
    sheets.append(finished("rarely", f"{_LONG} steps", _LEARNT, [*_learnt(rarely)]))
    panels = [
        ("200 steps", equal, "step", False),
        ("the same over bytes", equal, "bytes", True),
        ("each rank its own modules", different, "step", False),
    ]
    return BenchFigures(machine_facts(), sheets, lambda path: save_picture(path, panels))


_EQUAL = "200 steps of 32 sequences, 4 ranks"
_DIFFERENT = "the same, each rank on modules of its own"
_AVERAGED = "adapt_then_combine, averages more rarely"
_OUTER_STEPS = "perplexity of diloco, 400 steps, by outer step size η and momentum μ"
_NOTE = (
    "examples/gpt.py: each rank trains on 8 of the 32 sequences of a step, one process on all. "
    "Perplexity on text that nobody trains on: of the average model, of the average of the ranks' "
    "moving averages (EMA), and of the ranks' own models; mean and standard deviation of three "
    "seeds. The ratio is taken seed by seed. MB are those of one rank."
)
main = command("one-to-n", figures)

if __name__ == "__main__":
    main()
