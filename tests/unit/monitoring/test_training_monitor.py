"""The parts of a monitor: projections, the gathering of reports, where they go, what is refused."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import asyncddp as bf
from asyncddp.monitoring.random_projection import RandomProjection, distances
from asyncddp.monitoring.rank_record import Record
from asyncddp.monitoring.report_collector import RankStepReport, ReportCollector
from asyncddp.monitoring.sinks import ConsoleSink, JsonLinesSink
from tests.support import RUN_LIMIT
from tests.support.processes import warm_server

RECORD = Record(
    rank=0,
    step=50,
    time=1e9,
    consensus_distance=None,
    consensus_error=0.1,
    gradient_norm=2.0,
    step_seconds=0.1,
    exposed_seconds=0.025,
    monitor_seconds=0.001,
    bytes_sent=3_000_000,
    staleness=None,
)


# projections


SHAPES = {
    "random": torch.randn(9000, generator=torch.Generator().manual_seed(0)),
    "constant": torch.ones(9000),
    "one column": torch.zeros(30, 1024).index_fill_(1, torch.tensor([3]), 1.0),
    "one row": torch.zeros(30, 1024).index_fill_(0, torch.tensor([3]), 1.0),
    "less than the width": torch.arange(100.0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_norm_is_right_on_average_and_off_by_what_theory_says(name):
    """E‖P(x)‖² = ‖x‖² and sd ‖P(x)‖² ≤ √(2/k) ‖x‖², whatever the structure of x."""
    x, k, times = SHAPES[name], 64, 200
    ratios = torch.stack([RandomProjection(k, seed)([x]).square().sum() for seed in range(times)])
    ratios /= x.double().square().sum()
    expected = math.sqrt(2 / k)
    assert abs(float(ratios.mean()) - 1) < 4 * expected / math.sqrt(times)
    assert 0.8 * expected < float(ratios.std()) < 1.2 * expected


def test_it_is_linear():
    """P(a) − P(b) = P(a − b), so that distances can be read of projections."""
    project = RandomProjection()
    a, b = torch.randn(2, 70_000, dtype=torch.float64)
    torch.testing.assert_close(project([a]) - project([b]), project([a - b]))


def test_large_small_and_other_tensors_together():
    """Pieces, groups, dtypes and complex numbers: the norm is of all of them."""
    tensors = [
        torch.full((600_000,), 0.01),
        torch.full((3, 5), 2.0, dtype=torch.bfloat16),
        torch.full((7,), 1.0 + 1.0j),
        torch.full((4, 4), 1.0).t(),
        torch.full((1021, 2), 0.1, dtype=torch.float64),
    ]
    norm = math.sqrt(60 + 60 + 14 + 16 + 20.42)
    found = [float(RandomProjection(seed=seed)(tensors).norm()) / norm for seed in range(20)]
    assert abs(sum(found) / 20 - 1) < 4 / math.sqrt(2 * 64) / math.sqrt(20)


def test_all_ranks_project_alike():
    """Two projections made independently map equal tensors to the same bits."""
    x = torch.randn(5000)
    assert torch.equal(RandomProjection()([x]), RandomProjection()([x.clone()]))


def test_distances_of_what_is_equal_are_zero_to_the_last_bit():
    """Equal projections are at distance exactly 0.0 from their mean."""
    same = torch.randn(64, dtype=torch.float64)
    assert distances([same, same.clone(), same.clone()]) == [0.0, 0.0, 0.0]


# gathering


def report(rank, x, step=50, time=0.0):
    record = replace(RECORD, rank=rank, step=step, time=time)
    return RankStepReport(record, torch.tensor([x], dtype=torch.float64))


def told(complete):
    return [[(r.rank, r.step, r.consensus_distance) for r in records] for records in complete]


def test_a_step_is_complete_with_its_last_rank():
    """A step's records come in order of rank, with distances, once all ranks have reported."""
    collector = ReportCollector(3, patience=2)
    assert collector.add(report(2, 6.0)) == []
    assert collector.add(report(0, 0.0)) == []
    assert collector.add(report(0, 9.0, step=100)) == []
    found = told(collector.add(report(1, 3.0)))
    assert found == [[(0, 50, 3.0), (1, 50, 0.0), (2, 50, 3.0)]]


def test_a_step_waits_for_two_later_reports_and_takes_what_is_known():
    """Of the rank that is missing, its last projection counts."""
    collector = ReportCollector(2, patience=2)
    collector.add(report(0, 0.0, step=1))
    collector.add(report(1, 2.0, step=1))
    assert collector.add(report(0, 4.0, step=2)) == []
    assert collector.add(report(0, 6.0, step=3)) == []
    assert told(collector.add(report(0, 8.0, step=4))) == [[(0, 2, 1.0)]]
    assert told(collector.drain()) == [[(0, 3, 2.0)], [(0, 4, 3.0)]]


def test_quick_steps_wait_for_a_while_as_well():
    """A rank's message may come after many later steps of another."""
    collector = ReportCollector(2, patience=2, seconds=1.0)
    for step in range(1, 10):
        assert collector.add(report(0, 0.0, step=step, time=0.1 * step)) == []
    assert told(collector.add(report(1, 2.0, step=1, time=0.5))) == [[(0, 1, 1.0), (1, 1, 1.0)]]
    late = collector.add(report(0, 4.0, step=10, time=1.25))
    assert told(late) == [[(0, 2, 1.0)]], "only step 2 is older than a second"


def test_a_rank_that_has_ended_is_not_waited_for():
    """Once a rank is removed, a step is complete without it; its last projection counts."""
    collector = ReportCollector(2, patience=2)
    collector.add(report(0, 0.0, step=1))
    collector.add(report(1, 2.0, step=1))
    collector.add(report(0, 4.0, step=2))
    assert told(collector.remove(1)) == [[(0, 2, 1.0)]]
    assert collector.active == {0}


def test_without_patience_each_report_stands_for_itself_once_all_are_known():
    """A mean over some of the ranks is none: until all have reported, there is no distance."""
    collector = ReportCollector(2, patience=0)
    assert told(collector.add(report(0, 0.0))) == [[(0, 50, None)]]
    assert told(collector.add(report(1, 2.0))) == [[(1, 50, 1.0)]]
    assert told(collector.add(report(0, 6.0, step=100))) == [[(0, 100, 2.0)]]


# where reports go


def one_rank(to, steps=2, **options):
    """A run on one rank, where plain torch is all there is; gives the last record."""

    def case():
        model = torch.nn.Linear(2, 1)
        optimizer = bf.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        with bf.monitor(optimizer, 1, to, **options) as monitor:
            for _ in range(steps):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        return monitor.latest[0]

    with bf.local_world(1) as world:
        return world.run(case)[0]


def test_one_rank_alone_is_at_its_average():
    """A single rank reports distance 0, no bytes sent and no exposed communication."""
    record = one_rank(None)
    assert (record.consensus_distance, record.bytes_sent, record.exposed_seconds) == (0.0, 0, 0.0)


def test_several_places_get_the_same(tmp_path):
    """A file and a function get the same records; missing folders of the file are made."""
    seen = []
    one_rank([tmp_path / "a" / "run.jsonl", seen.append])
    lines = (tmp_path / "a" / "run.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == seen
    assert [record["step"] for record in seen] == [1, 2]


def test_a_file_is_begun_anew_but_continued_where_a_run_is(tmp_path):
    """A run overwrites the file unless ``first_step`` > 0, which appends to it."""
    path = tmp_path / "run.jsonl"
    for options in ({}, {}, {"first_step": 2}):
        one_rank(str(path), **options)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_what_is_not_finite_is_strict_json_too():
    """Infinity and NaN are written as strings, so that a record is strict JSON."""
    line = replace(RECORD, gradient_norm=math.inf, consensus_distance=math.nan).as_json()
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (found["gradient_norm"], found["consensus_distance"]) == ("inf", "nan")


KILLED = """
import os, signal, torch
import asyncddp as bf

def train():
    model = torch.nn.Linear(2, 1)
    optimizer = bf.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    bf.monitor(optimizer, 1, "run.jsonl")
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    os.kill(os.getpid(), signal.SIGKILL)

with bf.local_world(1) as world:
    world.run(train)
"""


@pytest.mark.launches
def test_a_run_that_is_killed_leaves_whole_lines(tmp_path):
    """kill -9, with nothing closed or flushed: every report that was made is in the file."""
    done = subprocess.run(
        [warm_server().python, "-c", KILLED], cwd=tmp_path, check=False, timeout=RUN_LIMIT
    )
    assert done.returncode == -signal.SIGKILL
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_ends_the_file_and_not_the_run(caplog):
    """A failed write logs one warning and ends the file; later writes raise nothing."""
    sink = JsonLinesSink(Path("/dev/full"))
    sink.write([RECORD])
    sink.write([RECORD])
    sink.close()
    assert [r.getMessage() for r in caplog.records] == [
        "monitor: /dev/full: No space left on device; it ends here"
    ]


def console(*, terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)


def shown(*reports, terminal):
    target = console(terminal=terminal)
    sink = ConsoleSink(target)
    for records in reports:
        sink.write(records)
    sink.close()
    return target.file.getvalue()


TWO = [
    replace(RECORD, consensus_distance=1.0),
    replace(RECORD, rank=1, consensus_distance=3.0, staleness=4),
]


def test_without_a_terminal_a_report_is_one_line():
    """Without a terminal a report is one line, and only where it holds rank 0's record."""
    text = shown(TWO, [TWO[1]], [TWO[0]], terminal=False)
    assert text.splitlines()[0] == (
        "monitor: step 50, distance 2 (worst 3), gradient 2, step time 100 ms, exposed 25.0%, "
        "sent 3.00 MB, stale 4, monitor 1.00%"
    )
    assert len(text.splitlines()) == 2, "only reports of rank 0 make lines"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_distance_that_is_not_known_yet_is_said_to_be(terminal):
    """Until all ranks have reported once; a dash where none is asked for."""
    assert "unknown yet" in shown([RECORD], terminal=terminal)
    assert "unknown yet" not in shown([replace(RECORD, consensus_error=None)], terminal=terminal)
    assert "unknown yet" not in shown(TWO, terminal=terminal)


@pytest.mark.parametrize(
    ("sent", "text"), [(12, "12 B"), (4_200, "4.20 kB"), (3_000_000, "3.00 MB")]
)
def test_bytes_have_the_unit_that_fits(sent, text):
    """Small models do not send 0 MB."""
    assert f"sent {text}," in shown([replace(RECORD, bytes_sent=sent)], terminal=False)


@pytest.mark.parametrize("terminal", [True, False])
def test_ranks_that_have_left_are_named(terminal):
    """And who gives their weight to itself."""
    left = [TWO[0], replace(TWO[1], departed=(2,)), replace(RECORD, rank=3, departed=(2,))]
    text = " ".join(shown(left, terminal=terminal).split())
    assert "left the averaging: rank 2, whose weight ranks 1, 3 keep" in text
    assert "left" not in shown(TWO, terminal=terminal)


def test_on_a_terminal_a_table_has_a_row_for_each_rank():
    """On a terminal the table has each rank's figures, and a dash for unknown ones."""
    text = shown(TWO, terminal=True)
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["0"], ["1"])]
    assert rows[-1] == ["1", "50", "3", "2", "100", "ms", "25.0%", "3.00", "MB", "4", "1.00%"]
    assert rows[-2] == ["0", "50", "1", "2", "100", "ms", "25.0%", "3.00", "MB", "-", "1.00%"]


def test_many_ranks_are_two_rows():
    """Of 33 ranks the table shows two rows: the median and the worst of them."""
    many = [replace(RECORD, rank=rank, consensus_distance=float(rank)) for rank in range(33)]
    text = shown(many, terminal=True)
    rows = [line.split()[:3] for line in text.splitlines() if " 50 " in line]
    assert rows[-2:] == [["median", "50", "16"], ["worst", "50", "32"]]
    assert {row[0] for row in rows} == {"median", "worst"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_each_figure_of_each_rank(tmp_path):
    """What TensorBoard itself reads from the event files."""
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    last = one_rank([f"tensorboard:{tmp_path / 'named'}"])
    with SummaryWriter(tmp_path / "given") as writer:
        one_rank(writer)
    for folder in ("named", "given"):
        events = EventAccumulator(str(tmp_path / folder)).Reload()
        found = events.Scalars("asyncddp/gradient_norm/rank 0")
        assert [event.step for event in found] == [1, 2]
        assert "asyncddp/consensus_distance/rank 0" in events.Tags()["scalars"]
        assert not [tag for tag in events.Tags()["scalars"] if "staleness" in tag]
    assert last.step == 2


def test_without_tensorboard_the_error_says_what_to_install(monkeypatch):
    """Without TensorBoard a sink for it raises EnvironmentProblem with the pip command."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(bf.RankError, match=r"pip install 'tensorboard>=2\.15'") as caught:
        one_rank("tensorboard:logs")
    assert isinstance(caught.value.__cause__, bf.EnvironmentProblem)


def test_what_a_function_raises_stops_the_loop():
    """What a sink function raises is raised in the training loop, on its first report."""

    def stop(record):
        raise KeyError(f"at {record['step']}")

    with pytest.raises(bf.RankError, match="KeyError: 'at 1'"):
        one_rank(stop)


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("consle", {}, "argument to: expected 'console', a file such as 'run.jsonl'.*'consle'"),
        (7, {}, "argument to: .*, got int"),
        ([print, 7], {}, "argument to: .*, got int"),
        (
            "/dev/null/run.jsonl",
            {},
            "cannot write /dev/null/run.jsonl: .*; give a file in a folder",
        ),
        (None, {"consensus": "exat"}, "argument consensus: expected 'projection'.*'exat'"),
        (None, {"first_step": -1}, "argument first_step: expected the number of steps.*-1"),
    ],
)
def test_what_cannot_be_is_refused(to, options, message):
    """An unknown or unwritable sink or a wrong option raises ArgumentError that names it."""
    with pytest.raises(bf.RankError, match=message) as caught:
        one_rank(to, **options)
    assert isinstance(caught.value.__cause__, bf.ArgumentError)


@pytest.mark.parametrize("every", [0, 2.5])
def test_an_impossible_interval_is_refused(every):
    """``monitor`` refuses an interval of 0 or 2.5 steps, a plain optimizer and a module."""

    def case():
        model = torch.nn.Linear(2, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(bf.ArgumentError, match="give the wrapper, not the optimizer in it"):
            bf.monitor(plain)
        with pytest.raises(bf.ArgumentError, match="got Linear; give what the training loop"):
            bf.monitor(model)
        with pytest.raises(bf.ArgumentError, match=f"every: expected at least 1 step, got {every}"):
            bf.monitor(bf.DistributedOptimizer(plain, model), every, None)

    with bf.local_world(1) as world:
        world.run(case)


def test_an_exact_distance_of_a_one_sided_method_is_refused():
    """It would make ranks wait that have chosen not to."""

    def case():
        model = torch.nn.Linear(2, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = bf.DistributedOptimizer(plain, model, "push_sum")
        with pytest.raises(bf.ArgumentError, match="which a one-sided method is there to avoid"):
            bf.monitor(optimizer, consensus="exact")

    with bf.local_world(1) as world:
        world.run(case)
