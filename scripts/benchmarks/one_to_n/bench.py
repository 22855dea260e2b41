"""``one-to-n``: a GPT on one process and on many, at equal tokens; figures of the guide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.machine_info import machine_facts
from benchmarks.one_to_n.trainings import SEEDS, Result, Training, train
from benchmarks.ranks import Advance
from benchmarks.report import BenchFigures, BenchOptions
from benchmarks.tables import FigureRow, FigureTable

_QUICK = " --smoke --steps 8 --evaluate-every 4"
_RANKS = (1, 2, 4, 8)
_RATES = (0.004, 0.008, 0.016)
_FOR_RANKS = ("gradient_allreduce", "adapt_then_combine", "local_sgd --every 10", "win_put")
_OUTER = ((1.0, 0.0), (0.5, 0.5), (0.7, 0.5), (0.2, 0.8), (0.4, 0.9), (0.7, 0.9))
_INTERVALS = (10, 40)
_LONG = 600  # steps of the trainings of methods that communicate rarely
_EVERY = "--evaluate-every 20 "


def _of(label: str, words: str, ranks: int = 4) -> Training:
    return Training(label, ranks, _EVERY + words)


def _diloco(kind: str, every: int) -> str:
    """Return the words of a method with outer steps that suit tens of rounds."""
    return f"--method {kind} --every {every} --set outer_lr=0.5 --set outer_momentum=0.5"


_SIGN = "choco_sgd --compression sign"
_EQUAL_TOKENS = {
    "ddp": "ddp",
    "gradient_allreduce": "gradient_allreduce",
    "adapt_then_combine": "adapt_then_combine",
    "adapt_with_combine": "adapt_with_combine",
    "choco_sgd, sign": _SIGN,
    "bytegrad": "bytegrad",
    "local_sgd, H = 10": "local_sgd --every 10",
}
_OUTER_10 = {f"{kind}, H = 10": _diloco(kind, 10) for kind in ("diloco", "noloco")}
_ALONE = "--method alone"
_EQUAL = (
    _of("one process", _ALONE, 1),
    *(_of(label, f"--method {words}") for label, words in _EQUAL_TOKENS.items()),
    *(_of(label, words) for label, words in _OUTER_10.items()),
    _of("one rank alone", _ALONE),
)
_DIFFERENT = tuple(
    _of(label, f"--split contiguous {words}")
    for label, words in {
        "gradient_allreduce": "--method gradient_allreduce",
        "adapt_then_combine": "--method adapt_then_combine",
        "gradient_tracking": "--method gradient_tracking",
        "choco_sgd, sign": f"--method {_SIGN}",
        "local_sgd, H = 10": "--method local_sgd --every 10",
        "diloco, H = 10": _OUTER_10["diloco, H = 10"],
        "one rank alone": _ALONE,
    }.items()
)
_RARELY = tuple(
    _of(label, f"--steps {_LONG} --evaluate-every 50 {words}")
    for label, words in {
        "ddp": "--method ddp",
        "local_sgd, H = 20": "--method local_sgd --every 20",
        "local_sgd, H = 5": "--method local_sgd --every 5",
        "diloco, H = 5": _diloco("diloco", 5),
        "diloco, H = 20, by default": "--method diloco --every 20",
        "diloco, H = 20": _diloco("diloco", 20),
        "streaming_diloco, H = 20": f"{_diloco('streaming_diloco', 5)} --set fragments=4",
        "noloco, H = 20": _diloco("noloco", 20),
    }.items()
)
_BY_GOSSIP = tuple(
    _of(label, f"--steps {_LONG} --evaluate-every 50 {words}")
    for label, words in {
        "gradient_allreduce": "--method gradient_allreduce",
        "local_sgd, H = 20": "--method local_sgd --every 20",
        "diloco, H = 20": _diloco("diloco", 20),
        "noloco, H = 20": _diloco("noloco", 20),
        "gasloc, H = 20": _diloco("gasloc", 20),
        "factored_gossip_diloco, H = 20": _diloco("factored_gossip_diloco", 20),
        "muloco, AdamW, H = 20": _diloco("muloco", 20),
        "muloco, Muon, H = 20": f"{_diloco('muloco', 20)} --optimizer muon",
    }.items()
)
_AVERAGES = tuple(
    _of(f"every {steps} steps", f"--set num_steps_per_communication={steps}")
    for steps in (1, 2, 5, 10, 20, 50)
)
_LEFT_AFTER = 120  # steps, of 200, after which a run is left
_LEARNT = ("method", "perplexity", "÷ the first's", "EMA", "one replica", "distance", "MB sent")
_NOTE = (
    "examples/gpt.py: each rank trains on 8 of the 32 sequences of a step, one process on all. "
    "Perplexity on text that nobody trains on: of the average model, of the average of the ranks' "
    "moving averages (EMA), and of the ranks' own models; mean and standard deviation of three "
    "seeds. The ratio is taken seed by seed. MB are those of one rank."
)


def _learnt(key: str, title: str, results: Sequence[Result], note: str = "") -> FigureTable:
    """A line for each training: how good its models are, and what it has sent."""
    first = results[0].last("perplexity")
    lines = [
        FigureRow(
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
        for one in results
    ]
    return FigureTable(key, title, _LEARNT, lines, note)


def _at_equal_bytes(key: str, title: str, results: Sequence[Result]) -> FigureTable:
    """Return a line for each training: perplexity when it has sent what the thriftiest one has."""
    least = min(mean(one.last("bytes")) for one in results)
    lines = [
        FigureRow((one.training.label, *one.told_after(least), f"{least / 1e6:.1f}"))
        for one in results
    ]
    return FigureTable(key, title, ("method", "perplexity", "steps", "MB sent at most"), lines)


def _resumed(folder: str) -> tuple[Training, ...]:
    """Return a training with a checkpoint on the way, and those that go on from it."""
    out = f"--out {folder}/{{seed}}"
    return (
        _of("4 ranks, never left", f"{out} --save-every {_LEFT_AFTER}"),
        *(_of(f"left by 4 ranks, resumed on {n}", f"{out} --resume", n) for n in (4, 2, 8, 1)),
    )


def _added_ranks(method: str) -> Callable[[Any, Any], Training]:
    def make(ranks: int, rate: float) -> Training:
        words = f"--method {method} --batch {8 * ranks} --lr {rate} --evaluate-every 200"
        return _of(f"{method}, {ranks} ranks, {rate}", words, ranks)

    return make


def _outer(interval: int, outer: tuple[float, float]) -> Training:
    words = f"--method diloco --every {interval} --steps 400 --evaluate-every 400"
    words += f" --set outer_lr={outer[0]} --set outer_momentum={outer[1]}"
    return _of(f"diloco, H = {interval}, {outer}", words)


def figures(options: BenchOptions, advance: Advance) -> BenchFigures:
    """Train everything that this bench shows."""
    from benchmarks.one_to_n.learning_plot import save_picture

    quick = options.quick

    def all_of(trainings: Sequence[Training]) -> list[Result]:
        """Train each with several seeds; quickly the last of them, with one."""
        if not quick:
            return [train(one, SEEDS, advance) for one in trainings]
        last = trainings[-1]
        return [train(last._replace(words=last.words + _QUICK), 1, advance)]

    def grid(
        make: Callable[[Any, Any], Training],
        rows: Sequence[Any],
        columns: Sequence[Any],
    ) -> Iterator[FigureRow]:
        """Yield a line for each row: perplexities over the columns."""
        for row in rows[-1:] if quick else rows:
            shown = columns[-1:] if quick else columns
            found = all_of([make(row, column) for column in shown])
            cells = [one.told("perplexity") for one in found]
            yield FigureRow((str(row), *cells, *[""] * (len(columns) - len(cells))))

    equal, different = all_of(_EQUAL), all_of(_DIFFERENT)
    tables = [
        _learnt("equal_tokens", "200 steps of 32 sequences, 4 ranks", equal, _NOTE),
        _learnt("different_data", "the same, each rank on modules of its own", different),
    ]
    with TemporaryDirectory(prefix="one-to-n-") as folder:
        resumed = all_of(_resumed(folder))
    title = f"adapt_then_combine, resumed after {_LEFT_AFTER} of 200 steps"
    tables.append(_learnt("resumed", title, resumed))
    for method in _FOR_RANKS:
        columns = ("ranks", *(f"step size {rate}" for rate in _RATES))
        title = f"perplexity of {method}, 200 steps of 8 sequences a rank"
        lines = [*grid(_added_ranks(method), _RANKS, _RATES)]
        tables.append(FigureTable(f"ranks_{method.split()[0]}", title, columns, lines))
    title = "adapt_then_combine, averages more rarely"
    tables.append(_learnt("averages", title, all_of(_AVERAGES)))
    title = "perplexity of diloco, 400 steps, by outer step size η and momentum μ"
    columns = ("H", *(f"η = {rate}, μ = {momentum}" for rate, momentum in _OUTER))
    tables.append(FigureTable("outer", title, columns, [*grid(_outer, _INTERVALS, _OUTER)]))
    tables.append(_learnt("rarely", f"{_LONG} steps", all_of(_RARELY)))
    by_gossip, title = all_of(_BY_GOSSIP), f"outer steps by gossip and in two bits, {_LONG} steps"
    tables.append(_learnt("by_gossip", title, by_gossip))
    tables.append(_at_equal_bytes("by_gossip_bytes", "the same at equal bytes", by_gossip))
    panels = [
        ("200 steps", equal, "step", False),
        ("the same over bytes", equal, "bytes", True),
        ("each rank its own modules", different, "step", False),
    ]

    def save(path: Path) -> None:
        save_picture(path, panels)
        beside = path.with_stem(f"{path.stem}-resumed")
        save_picture(beside, [(f"resumed after {_LEFT_AFTER} steps", resumed, "step", False)])

    return BenchFigures(machine_facts(), tables, save)
