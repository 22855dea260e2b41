"""A report's figures are those that the spans were made of, and what they do not tell is words."""

from __future__ import annotations

import builtins
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.timeline.merged_trace import open_traces
from asyncddp.timeline.report.intervals import intersection, length_within, union
from asyncddp.timeline.report.timeline_plot import draw_timeline, find_typical_steps
from asyncddp.timeline.report.timeline_report import build_report
from asyncddp.timeline.report.trace_spans import collect_spans

from .timeline_files import VERB, Rank, straggling

END = 40
SPANS = st.lists(
    st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: sorted(pair)), max_size=12
)


def cells(spans):
    """The unit intervals of [0, END) that are in at least one span."""
    return {k for begin, end in spans for k in range(begin, end)}


@given(SPANS)
def test_a_union_holds_what_any_span_holds_in_order_and_apart(spans):
    """The union covers what any span covers, as sorted intervals that do not touch."""
    moments = union(spans)
    assert cells(moments.astype(int).tolist()) == cells(spans)
    edges = moments.ravel()
    assert (np.diff(edges) > 0).all()


@given(SPANS, SPANS)
def test_what_is_common_is_in_both(one, other):
    """The intersection covers exactly what both unions cover."""
    both = intersection(union(one), union(other))
    assert cells(both.astype(int).tolist()) == cells(one) & cells(other)


@given(SPANS, SPANS)
def test_lengths_within_windows_count_each_moment_once(spans, windows):
    """The length within a window is that of the spans' union there, overlaps counted once."""
    lengths = length_within(union(spans), windows)
    assert lengths.tolist() == [len(cells(spans) & cells([window])) for window in windows]


def read(tmp_path, *ranks, **more):
    """The spans of ranks' files."""
    for rank in ranks:
        rank.write(tmp_path)
    return collect_spans(open_traces([tmp_path]).events())


KINDS = st.sampled_from(["forward", "backward", "optimizer", "wait", "enqueue", "transfer", "mix"])


@given(st.lists(st.tuples(KINDS, st.integers(0, 90), st.integers(1, 30)), min_size=1))
def test_a_step_is_compute_exposed_and_other_and_hidden_is_in_compute(spans):
    """However spans overlap, no time is counted twice and none is lost."""
    events = [
        {"ph": "X", "cat": kind, "name": kind, "ts": begin, "dur": long, "pid": 0, "tid": tid}
        for kind, begin, long in [("step", 0, 60), ("step", 60, 60), ("forward", 0, 1), *spans]
        for tid in [{"transfer": 100, "mix": 3}.get(kind, 2 if kind in ("wait", "enqueue") else 1)]
    ]
    (one,) = build_report(collect_spans(events), skip=0).ranks
    exposed = one.exposed or 0.0
    assert one.step == pytest.approx(one.compute + exposed + one.other)
    assert min(one.compute, exposed, one.other) >= -1e-12
    assert 0 <= (one.hidden or 0.0) <= one.compute + 1e-12


def test_figures_are_those_that_the_spans_were_made_of(tmp_path):
    """Step, compute, exposed time, waits and bytes per step are those of the trace written."""
    recording = read(tmp_path, *straggling(steps=6))
    found = build_report(recording)
    assert found.size == 4
    fast, *_, slow = found.ranks
    assert (fast.rank, slow.rank, fast.steps, slow.steps) == (0, 3, 5, 5)
    assert (fast.step, fast.step_median, slow.step) == pytest.approx((5.5, 5.5, 5.5))
    assert (fast.compute, slow.compute) == pytest.approx((1.1, 5.1))
    assert (fast.exposed, slow.exposed) == pytest.approx((4.3, 0.3))
    assert (fast.other, slow.other) == pytest.approx((0.1, 0.1))
    assert dict(fast.waited) == pytest.approx({3: 4.1})
    assert all((one.sent, one.received) == (4000.0, 4000.0) for one in found.ranks)
    assert found.left_out == ()


def test_the_straggler_is_slowest_and_waited_for_most(tmp_path):
    """The rank that computes longest is the slowest, and the one that holds up the others."""
    found = build_report(read(tmp_path, *straggling(steps=20)))
    assert found.slowest_by_compute == found.slowest == 3
    assert found.holds_up == 3
    waits = dict(found.waited_for)
    assert waits[found.waited_for_most] == max(waits.values()) == pytest.approx(waits[3], rel=0.01)
    assert found.others(3, "compute") == pytest.approx(1.1)


def test_a_rank_that_is_late_for_another_reason_than_compute_is_slowest_all_the_same():
    """A slow disk shows neither in compute nor in communication, but the others wait for it."""
    ranks = [Rank(0, 2).clock(0.0), Rank(1, 2).clock(0.0)]
    events = []
    for rank in ranks:
        for k in range(3):
            begin = 1000.0 * k
            rank.span("step", begin, begin + 1000, step=k)
            rank.span("forward", begin + 800 * rank.rank, begin + 800 * rank.rank + 110)
            if rank.rank == 0:
                rank.wait(begin + 110, begin + 990, 1)
        events += rank.events
    found = build_report(collect_spans(events))
    assert found.slowest_by_compute == 0
    assert found.slowest == found.waited_for_most == found.holds_up == 1
    assert found.ranks[1].other == pytest.approx(0.89)


def collective(late, size=3, calls=4):
    """Ranks that call one collective again and again, of which one is late each time."""
    ranks = [Rank(number, size, ahead=1e5 * number).clock(0.0) for number in range(size)]
    for k, rank in itertools.product(range(calls), ranks):
        begin, end = 1000.0 * k + 500.0 * (rank.rank == late[k]), 1000.0 * k + 700
        others = [other for other in range(size) if other != rank.rank]
        args = {"verb": "allreduce", "name": "allreduce.noname"}
        rank.span("enqueue", begin, end, 2, **args).span("collective", end - 50, end, 100, **args)
        rank.span("wait", begin + 10, end, 2, **args, **{"for": others})
    return ranks


def test_in_a_collective_the_one_that_is_waited_for_came_last(tmp_path):
    """A rank by itself notes all the others; only together they show who it was."""
    found = build_report(read(tmp_path, *collective(late=[1, 1, 0, 1])))
    assert dict(found.ranks[2].waited) == pytest.approx({1: 3 * 0.69, 0: 0.69})
    assert dict(found.ranks[1].waited) == pytest.approx({-1: 3 * 0.19, 0: 0.69})
    assert found.waited_for_most == found.holds_up == 1


def test_nobody_is_blamed_where_a_file_is_missing_or_ends_early(tmp_path):
    """A wait in a call that some rank did not record is counted for nobody, as rank -1."""
    ranks = collective(late=[1, 1, 1, 1])
    ranks[0].events = [e for e in ranks[0].events if e.get("ts", 0.0) < 1500.0]
    found = build_report(read(tmp_path, *ranks))
    assert dict(found.ranks[2].waited) == pytest.approx({1: 2 * 0.69, -1: 2 * 0.69})
    (tmp_path / "rank0.json").unlink()
    found = build_report(read(tmp_path, *ranks[1:]))
    assert dict(found.ranks[1].waited) == pytest.approx({-1: 4 * 0.69})


def test_hidden_is_what_travels_or_is_mixed_by_another_thread_under_compute(tmp_path):
    """Hidden time is other threads' transfers and mixing that overlap compute."""
    rank = Rank(0).clock(0.0).span("step", 0.0, 100.0).span("forward", 0.0, 60.0)
    rank.transfer("receive", 10.0, 30.0, 1, 8).transfer("receive", 20.0, 40.0, 2, 8)
    rank.span("mix", 50.0, 70.0, 3, verb=VERB).wait(60.0, 80.0, 1)
    rank.span("wait", 0.0, 90.0, 3, verb=VERB, **{"for": [3]})
    (one,) = build_report(read(tmp_path, rank), skip=0).ranks
    assert (one.hidden, one.exposed) == pytest.approx((0.04, 0.02))
    assert (one.received, dict(one.waited)) == (16.0, {1: 0.02})


def test_nested_spans_are_counted_once(tmp_path):
    """Nested spans of one kind count once, and waits inside a verb count as its time."""
    rank = Rank(0).clock(0.0).span("step", 0.0, 100.0)
    for depth in range(4):
        rank.span("forward", depth, 50.0 - depth, called="net" + ".a" * depth)
    rank.span("enqueue", 60.0, 90.0, 2, verb=VERB).wait(65.0, 80.0, 1)
    (one,) = build_report(read(tmp_path, rank), skip=0).ranks
    assert (one.compute, one.exposed, one.other) == pytest.approx((0.05, 0.03, 0.02))


def test_a_hook_that_waits_within_backward_does_not_compute(tmp_path):
    """A wait within backward is exposed, not compute; a collective beside it is hidden."""
    rank = Rank(0).clock(0.0).span("step", 0.0, 100.0).span("backward", 0.0, 80.0)
    rank.wait(20.0, 50.0, 1).span("collective", 40.0, 60.0, 100, verb="allreduce", bytes=8)
    (one,) = build_report(read(tmp_path, rank), skip=0).ranks
    assert (one.compute, one.exposed, one.other) == pytest.approx((0.05, 0.03, 0.02))
    assert one.hidden == pytest.approx(0.01)
    assert (one.sent, one.received) == (None, None)


def test_every_thread_that_calls_is_held_up_by_what_it_calls(tmp_path):
    """A script may communicate in one thread and train in another: both have tracks."""
    rank = Rank(0).clock(0.0).span("step", 0.0, 100.0).wait(0.0, 10.0, 1)
    rank.span("wait", 40.0, 60.0, 50, verb=VERB, **{"for": [2]})
    (one,) = build_report(read(tmp_path, rank), skip=0).ranks
    assert one.exposed == pytest.approx(0.03)
    assert dict(one.waited) == pytest.approx({1: 0.01, 2: 0.02})


def test_bytes_read_where_they_lie_are_received(tmp_path):
    """So that what is received is what is sent, whatever the transport."""
    ranks = straggling(size=3, nbytes=800)
    for event in [event for rank in ranks for event in rank.events]:
        event["name"] = event["name"].replace("receive", "read")
    found = build_report(read(tmp_path, *ranks), skip=0)
    assert [(one.sent, one.received) for one in found.ranks] == [(800.0, 800.0)] * 3


def test_warm_up_is_left_out(tmp_path):
    """Figures leave out the first ``skip`` steps, by default one; too many are an error."""
    rank = Rank(0).clock(0.0)
    for k, (begin, end) in enumerate([(0.0, 1000.0), (1000.0, 1100.0), (1100.0, 1300.0)]):
        rank.span("step", begin, end, step=k).span("forward", begin, begin + 10 * (k + 1))
        rank.transfer("send", begin, begin + 1, 0, 100 * (k + 1))
    recording = read(tmp_path, rank)
    by_skip = {skip: build_report(recording, skip).ranks[0] for skip in (None, 0, 1, 2)}
    assert {skip: one.steps for skip, one in by_skip.items()} == {None: 2, 0: 3, 1: 2, 2: 1}
    assert by_skip[None] == by_skip[1]
    assert by_skip[1].compute == pytest.approx(0.025)
    assert (by_skip[0].sent, by_skip[2].sent) == (200.0, 300.0)
    with pytest.raises(ArgumentError, match="--skip 3 leaves nothing of the 3 steps of rank 0"):
        build_report(recording, 3)


def test_a_single_step_is_not_skipped_by_itself(tmp_path):
    """Where a rank has a single step, it is not skipped as warm-up."""
    found = build_report(read(tmp_path, Rank(0).clock(0.0).span("step", 0.0, 100.0)))
    assert found.ranks[0].steps == 1


def test_spread_is_of_the_steps(tmp_path):
    """A rank's step spread is the 10th and 90th percentile of its steps beside the median."""
    rank = Rank(0).clock(0.0)
    for k in range(101):
        rank.span("step", 1000.0 * k, 1000.0 * k + k)
    (one,) = build_report(read(tmp_path, rank), skip=0).ranks
    assert (one.step_median, one.step_low, one.step_high) == pytest.approx((0.05, 0.01, 0.09))


def test_without_steps_and_modules_the_figures_are_of_all_and_words_say_so(tmp_path):
    """Without steps the figures are totals; each unknown one is None, with a note why."""
    ranks = [Rank(k, 3).clock(0.0) for k in (0, 1)]
    for rank in ranks:
        rank.span("enqueue", 5e3, 8e3, 2, verb=VERB, bytes=8)
        rank.span("enqueue", 8e3, 9e3, 2, verb="barrier", bytes=0)
    ranks[0].wait(6e3, 8e3)
    found = build_report(read(tmp_path, *ranks))
    one = found.ranks[0]
    assert (one.steps, one.step, one.step_median, one.other, one.compute) == (None,) * 5
    assert (one.recorded, one.exposed, one.waited) == (4.0, 4.0, ((-1, 2.0),))
    assert found.ranks[1].waited is None
    assert (one.hidden, one.sent, one.received) == (None, None, None)
    assert found.slowest is found.waited_for_most is found.holds_up is None
    assert [note.partition(":")[0] for note in found.left_out] == [
        "Of rank 2 no file is there.",
        "Step times of ranks 0, 1 are not known, because no distributed optimizer stepped there",
        "Compute of ranks 0, 1 is not known",
        "Some of the time that rank 0 waited was for nobody who is known to have been late",
        "Bytes leave out neighbor_allreduce",
    ]


def test_ranks_without_spans_or_communication_are_named(tmp_path):
    """Ranks without spans or communication are noted; no span at all is an error."""
    alone = Rank(0, 2).clock(0.0).span("step", 0.0, 100.0).span("forward", 0.0, 60.0)
    found = build_report(read(tmp_path, alone, Rank(1, 2).clock(0.0)))
    assert found.left_out == (
        "Of rank 1 nothing is known: no span is in the file.",
        "Of rank 0 no communication is in the trace.",
    )
    assert found.ranks[0].other == pytest.approx(0.04)
    with pytest.raises(ArgumentError, match="the timeline has no spans; nothing was computed"):
        build_report(collect_spans([]))


def test_categories_of_later_versions_are_let_be(tmp_path):
    """Spans of a category that is not known change nothing in the report."""
    plain = straggling()
    before = build_report(read(tmp_path, *plain))
    for rank in plain:
        rank.span("teleport", 0.0, 1e3, tid=77, whom={"a": [None]})
    assert build_report(read(tmp_path, *plain)) == before


def test_plain_data_is_strict_json_without_what_is_not_known(tmp_path):
    """A report's data is strict JSON that leaves out unknown figures."""
    found = build_report(read(tmp_path, Rank(0).clock(0.0).span("step", 0.0, 100.0)))
    data = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert data["ranks"] == [
        {"rank": 0, "steps": 1, "recorded": 0.1, "step": 0.1}
        | {"step_median": 0.1, "step_low": 0.1, "step_high": 0.1}
    ]
    assert "slowest" not in data
    assert any("Compute of rank 0 is not known" in note for note in data["left_out"])


def test_the_strip_shows_consecutive_steps_of_usual_length(tmp_path):
    """The strip shows consecutive steps whose total length is nearest the median's."""
    rank = Rank(0).clock(0.0)
    for begin, end in itertools.pairwise([0.0, 900.0, 1000.0, 1103.0, 1198.0, 2000.0]):
        rank.span("step", begin, end)
    recording = read(tmp_path, rank)
    assert find_typical_steps(recording, 1) == (1000.0, 1103.0)
    assert find_typical_steps(recording, 3) == (900.0, 1198.0)
    assert find_typical_steps(recording, 9) == (0.0, 2000.0)


@pytest.mark.parametrize(
    ("size", "name", "start"), [(1, "report.svg", b"<?xml"), (12, "report.png", b"\x89PNG")]
)
def test_pictures_have_a_bar_and_a_strip_per_rank(tmp_path, size, name, start):
    """A picture has a bar for every rank and strips of at most 8, the last rank included."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    recording = read(tmp_path, *straggling(size))
    figure = draw_timeline(recording, build_report(recording))
    bars, strip = figure.axes
    labels = [label.get_text() for label in bars.get_yticklabels()]
    assert labels == [f"rank {rank}" for rank in range(size)]
    shown = [label.get_text() for label in strip.get_yticklabels()]
    assert f"rank {size - 1}" in shown
    assert len(shown) == min(size, 8)
    figure.savefig(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_pictures_need_no_steps(tmp_path):
    """Without steps a picture shows all that was recorded, and the strip its middle."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    rank = Rank(0).clock(0.0)
    for k in range(101):
        rank.wait(10.0 * k, 10.0 * k + 5, 0)
    recording = read(tmp_path, rank)
    figure = draw_timeline(recording, build_report(recording))
    assert "all that was recorded" in figure.axes[0].get_title(loc="left")
    assert "middle of what was recorded" in figure.axes[1].get_title(loc="left")
    assert find_typical_steps(recording) == pytest.approx((450.0, 550.0))
    single = read(tmp_path, Rank(0).clock(0.0).wait(10.0, 30.0, 0))
    assert find_typical_steps(single) == (10.0, 30.0)


def test_without_matplotlib_an_error_says_how_to_get_it(tmp_path, monkeypatch):
    """Without matplotlib drawing raises EnvironmentProblem with the pip command."""
    recording = read(tmp_path, *straggling(2))
    real = builtins.__import__

    def absent(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'matplotlib>=3\.8'"):
        draw_timeline(recording, build_report(recording))
