"""``sharded``: a GPT in shards over slow links, beside HSDP, torchft and the guide's formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean, stdev
from typing import Any, NamedTuple

from benchmarks.elastic.rivals import torchft_python
from benchmarks.machine_info import machine_facts
from benchmarks.network.hosts import HostNetwork, check_hosts, run_on_hosts
from benchmarks.ranks import Advance, run_on_ranks
from benchmarks.report import BenchFigures, BenchOptions
from benchmarks.tables import FigureRow, FigureTable, RivalUnavailableError, TimingRow

_REPLICAS, _SHARDS, _EVERY, _LAYERS = 2, 2, 10, 2
_WORDS = f"--replicas {_REPLICAS} --shards {_SHARDS} --every {_EVERY} --layers {_LAYERS} "
_QUICK_WORDS = "--batch 2 --width 16 --length 16 "
_SEEDS, _STEPS, _ROUNDS = 3, 400, 6
_ACCELERATOR = 0.150  # seconds of a step in which a rank's processor is free
_RATES, _DELAYS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9}, (0, 20, 80)  # bits a second, milliseconds
_COLORS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7")
_PROGRAM = "sharded_rank:train"
ALONE, HSDP, TORCHFT = "alone", "hsdp", "torchft"


class _Method(NamedTuple):
    """Label, and by the guide's formula shards that a rank sends in a step, messages in a row."""

    label: str
    shards: float = 0
    messages: float = 0


_RING, _IN_A_ROW = 2 * (_REPLICAS - 1) / _REPLICAS, 2 * (_REPLICAS - 1)
_METHODS = {
    ALONE: _Method("replicas alone"),
    HSDP: _Method("HSDP", _RING, _IN_A_ROW * (_LAYERS + 1)),
    "one_peer": _Method("adapt_then_combine, one peer", 1, 1),
    "choco_sgd": _Method("choco_sgd, sign", 1 / 32, 1),
    "diloco": _Method(f"diloco, H = {_EVERY}", _RING / _EVERY, _IN_A_ROW / _EVERY),
    TORCHFT: _Method(f"torchft's DiLoCo, H = {_EVERY}", _RING / _EVERY, _IN_A_ROW / _EVERY),
    "noloco": _Method(f"noloco, H = {_EVERY}", 2 / _EVERY, 1 / _EVERY),
}
_LOSS_NOTE = (
    f"examples/sharded_gpt.py, {_STEPS} steps: 2 replicas of 2 shards, all methods with the same "
    "tokens and step size, outer steps with η = 0.5 and μ = 0.5. Held-out loss of the average "
    f"model, mean and standard deviation of {_SEEDS} seeds; the difference is taken seed by seed. "
    "MB that a rank sends to the other replica in a step: by the guide's formula, and by the "
    "interface of its host, with headers. HSDP sends its messages for each group of FSDP2's."
)
_TIME_NOTE = (
    "Two hosts, which are network namespaces of this machine and share its cores; a replica on "
    f"each, whose two ranks share its link. Layers sleep {1000 * _ACCELERATOR:.0f} ms a step, as "
    f"an accelerator computes while the processor is free. Rank 0's rounds of {_EVERY} steps: "
    "median and spread; in brackets by the guide's formula, on top of the replicas alone. It "
    "overlaps nothing, as gloo does not with FSDP2 on processors."
)
_USED_NOTE = "Step of the replicas alone ÷ step; in brackets by the guide's formula."


class _Link(NamedTuple):
    """Link between the hosts, and what each method took over it."""

    title: str
    rate: float
    delay: float
    rows: Mapping[str, TimingRow]
    sent: Mapping[str, float]

    def cells(self, name: str) -> tuple[str, str]:
        """Return a method's step and utilisation, those by the formula in brackets."""
        row, alone = self.rows[name], self.rows[ALONE].median
        wire = 8 * row.nbytes / self.rate  # of a replica, whose ranks share the link
        model = alone + _METHODS[name].messages * self.delay + _METHODS[name].shards * wire
        step = f"{1000 * row.median:.0f} ±{row.spread:.0%} [{1000 * model:.0f}]"
        return step, f"{alone / row.median:.0%} [{alone / model:.0%}]"


class _Bench(NamedTuple):
    """What all trainings share: the methods, how much is trained, and arguments of the ranks."""

    names: Sequence[str]
    quick: bool
    rounds: int
    given: Mapping[str, Any]
    advance: Advance

    def words(self, name: str, steps: int, seed: int = 0) -> list[str]:
        """Return the example's options."""
        words = f"{_WORDS} --method {name} --steps {steps} --seed {seed} "
        return (words + _QUICK_WORDS * self.quick).split()

    def losses(self) -> Mapping[str, list[float]]:
        """Train on this machine, without links, with each method and seed."""
        runs = [
            (name, seed) for name in self.names[1:] for seed in range(1 if self.quick else _SEEDS)
        ]
        steps = 2 * _EVERY if self.quick else _STEPS
        trainings = [self.words(name, steps, seed) for name, seed in runs]
        work, alone = {"trainings": trainings, **self.given}, {"OMP_NUM_THREADS": "1"}
        found = run_on_ranks(_REPLICAS * _SHARDS, _PROGRAM, work, self.advance, alone)
        losses: dict[str, list[float]] = {}
        for (name, _), record in zip(runs, found["records"], strict=True):
            losses.setdefault(name, []).append(record["loss"])
        return losses

    def over(self, title: str, rate: float, milliseconds: int) -> _Link:
        """Train with each method over one link; the first round is left out."""
        words, title = f"{rate / 1e6:.0f}mbit", f"{title}, {milliseconds} ms"
        network = HostNetwork(_REPLICAS, words, milliseconds / 1000, ranks_per_host=_SHARDS)
        trainings = [self.words(name, (self.rounds + 1) * _EVERY) for name in self.names]
        layers = {"accelerator": 0.01 if self.quick else _ACCELERATOR, "interface": "e0"}
        work = {"trainings": trainings, **layers, **self.given}
        found = run_on_hosts(network, _PROGRAM, work, lambda text: self.advance(f"{title}, {text}"))
        rows, sent = {}, {}
        for name, record in zip(self.names, found["records"], strict=True):
            ends, begins, counts = zip(*record["marks"][1:], strict=True)
            steps = [(end - begin) / _EVERY for begin, end in zip(begins, ends[1:], strict=False)]
            key, nbytes = f"sharded_{words}_{milliseconds}", 4 * record["parameters"]
            rows[name] = TimingRow(key, name, nbytes, _EVERY, steps)
            sent[name] = (counts[-1] - counts[0]) / _EVERY / self.rounds / _SHARDS
        return _Link(title, rate, milliseconds / 1000, rows, sent)


def _told(found: Sequence[float]) -> str:
    return f"{mean(found):.3f}" + (f" ±{stdev(found):.3f}" if len(found) > 1 else "")


def _loss_table(losses: Mapping[str, Sequence[float]], link: _Link) -> FigureTable:
    """A line for each method: its loss, beside HSDP's, and what a rank sends."""
    lines = []
    for name, found in losses.items():
        method, nbytes = _METHODS[name], link.rows[name].nbytes / _SHARDS
        over = [mine - other for mine, other in zip(found, losses[HSDP], strict=True)]
        sent = [f"{one / 1e6:.4f}" for one in (method.shards * nbytes, link.sent[name])]
        cells = (method.label, _told(found), _told(over), f"{method.messages:g}", *sent)
        lines.append(FigureRow(cells))
    columns = ("method", "loss", "over HSDP's", "messages in a row", "MB by formula", "MB measured")
    return FigureTable("sharded_loss", "loss at equal tokens", columns, lines, _LOSS_NOTE)


def _torchft(options: BenchOptions) -> tuple[dict[str, str], list[str]]:
    """Return where torchft's packages are, or in a sentence why they are not."""
    why = "it is not installed; --with-torchft installs it into an environment of its own"
    try:
        if options.with_torchft:
            packages = torchft_python().parents[1].glob("lib/python*/site-packages")
            return {"torchft": str(next(packages))}, []
    except RivalUnavailableError as problem:
        why = str(problem)
    return {}, [f"torchft's DiLoCo was not measured: {why}"]


def figures(options: BenchOptions, advance: Advance) -> BenchFigures:
    """Everything that this bench shows.

    Raises:
        RunFailedError: Hosts cannot be made here, or a run failed.
    """
    from benchmarks.plots import draw_bars

    check_hosts()
    given, missing = _torchft(options)
    names = [name for name in _METHODS if name != TORCHFT or given]
    quick, rounds = options.quick, options.rounds or (2 if options.quick else _ROUNDS)
    bench = _Bench(names, quick, rounds, given, advance)
    losses = bench.losses()
    places = [(title, rate, delay) for title, rate in _RATES.items() for delay in _DELAYS]
    links = [bench.over(*place) for place in (places[-2:-1] if quick else places)]
    cells = {name: [link.cells(name) for link in links] for name in names}
    columns = ("method", *(link.title for link in links))
    titles = (("ms", "milliseconds a step", _TIME_NOTE), ("used", "utilisation", _USED_NOTE))
    tables = [_loss_table(losses, links[0])]
    for place, (key, title, note) in enumerate(titles):
        lines = [
            FigureRow((_METHODS[name].label, *(one[place] for one in cells[name])))
            for name in names
        ]
        tables.append(FigureTable(f"sharded_{key}", title, columns, lines, note))
    bars = {
        link.title: ([link.rows[ALONE].median / link.rows[name].median for name in names], color)
        for link, color in zip(links, _COLORS, strict=False)
    }
    labels = [_METHODS[name].label for name in names]
    draw = partial(draw_bars, names=labels, series=bars, label="utilisation", height=0.8)
    rows = [row for link in links for row in link.rows.values()]
    return BenchFigures({**machine_facts(), "rounds": rounds}, tables, draw, rows, missing)
