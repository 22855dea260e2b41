"""Merging puts all ranks on one clock, keeps whole arrows, and says what is not there."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncddp.errors import ArgumentError
from asyncddp.timeline.merged_trace import (
    ClockAlignment,
    FlowArrowMatcher,
    open_traces,
    write_merged_trace,
)
from asyncddp.timeline.trace_files import find_trace_files, is_merged, read_events, scan_trace

from .timeline_files import Rank, straggling


def strict(text):
    """Parse JSON that holds no NaN and no Infinity."""

    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def merged(folder, sources=None):
    """What was opened, and the events of the file written of it."""
    merge = open_traces(sources or [folder])
    path = folder / "trace.json"
    count = write_merged_trace(merge, path)
    events = strict(path.read_text())
    assert len(events) == count
    assert list(read_events(path)) == events
    return merge, events


def of(events, **wanted):
    return [e for e in events if all(e.get(key) == value for key, value in wanted.items())]


@given(
    ahead=st.floats(-1e9, 1e9),
    drift=st.floats(-1e-4, 1e-4),
    times=st.lists(st.floats(0, 6e7), min_size=1, max_size=20),
)
def test_a_clock_that_drifts_steadily_is_undone_between_measurements(ahead, drift, times):
    """Times of a clock of constant drift are converted to within 0.01 µs of the true ones."""
    rank = Rank(1, ahead=ahead, drift=drift)
    points = [(rank.local(t), t - rank.local(t), 1.0) for t in (0.0, 3e7, 6e7)]
    clock = ClockAlignment(points)
    for time in times:
        assert clock(rank.local(time)) == pytest.approx(time, abs=0.01)
    assert clock.drift() == pytest.approx(abs(drift), abs=2e-8)
    assert clock.drifting == (abs(6e7 * drift) > 2.0) or abs(drift) < 1e-7


def test_outside_its_measurements_a_clock_is_held_and_its_error_grows_with_the_drift():
    """Outside its measurements a clock keeps the nearest offset, with a larger error bound."""
    clock = ClockAlignment([(0.0, 10.0, 2.0), (1e6, 20.0, 5.0)])
    assert (clock(-5.0), clock(2e6)) == (5.0, 2e6 + 20.0)
    assert clock.error(0.0, 1e6) == 5.0
    assert clock.error(0.0, 2e6) == pytest.approx(5.0 + 10.0)
    assert ClockAlignment([(0.0, 10.0, 2.0)]).error(0.0, 1e6) == pytest.approx(102.0)
    assert ClockAlignment([(0.0, 10.0, 2.0)], drifts=False).error(0.0, 1e6) == 2.0


def test_all_ranks_are_on_the_clock_of_rank_0_whose_start_is_time_0(tmp_path):
    """What happened at one time is at one time, whatever the ranks' own clocks said."""
    hosts = [("a", 7e9, 0.0), ("a", 7e9, 0.0), ("b", -3e8, 4e-5), ("c", 12.5, -4e-5)]
    for number, (host, ahead, drift) in enumerate(hosts):
        rank = Rank(number, 4, host, ahead=ahead if number > 1 else 0.0, drift=drift)
        rank.clock(0.0, error=3.0 + number).span("forward", 1000.0, 2000.0)
        rank.span("step", 500.0, 59e6).clock(60e6, error=1.0).write(tmp_path)
    merge, events = merged(tmp_path)
    for name, begin in (("forward", 1000.0), ("step", 500.0)):
        spans = of(events, name=name)
        assert [span["pid"] for span in sorted(spans, key=lambda s: s["pid"])] == [0, 1, 2, 3]
        assert [span["ts"] for span in spans] == pytest.approx([begin] * 4, abs=0.01)
    assert merge.clock_error == 6.0
    assert merge.drift == pytest.approx(4e-5, rel=1e-3)
    assert not of(events, name="asyncddp.clock")


def test_spans_that_nest_or_follow_each_other_still_do_on_another_clock(tmp_path):
    """Perfetto leaves out spans that overlap in part."""
    rank = Rank(1, 2, "b", drift=1e-4)

    def split(begin, end, depth):
        rank.span("forward", begin, end)
        if depth:
            middle = begin + (end - begin) * 0.37
            split(begin, middle, depth - 1)
            split(middle, end, depth - 1)

    split(0.0, 5e6 / 7, 6)
    rank.clock(0.0).clock(6e6).write(tmp_path)
    Rank(0, 2, "a").clock(0.0).write(tmp_path)
    _, events = merged(tmp_path)
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in of(events, cat="forward")]
    nanoseconds = [(round(1e3 * begin), round(1e3 * end)) for begin, end in spans]
    opened = []
    for begin, end in sorted(nanoseconds, key=lambda span: (span[0], -span[1])):
        while opened and opened[-1] <= begin:
            opened.pop()
        assert not opened or end <= opened[-1]
        opened.append(end)
    assert len(spans) == 127


def test_no_time_is_negative_where_another_rank_began_before_rank_0(tmp_path):
    """Perfetto drops events at negative times."""
    Rank(0, 2).clock(500.0).span("step", 600.0, 700.0).write(tmp_path)
    Rank(1, 2).clock(100.0).span("step", 200.0, 300.0).write(tmp_path)
    _, events = merged(tmp_path)
    assert {e["pid"]: e["ts"] for e in of(events, name="step")} == {0: 400.0, 1: 0.0}


def test_nothing_is_lost_or_changed_but_times_and_the_names_of_arrows(tmp_path):
    """Merging changes no event but in its time and, of an arrow, its id."""
    ranks = straggling()
    for rank in ranks:
        rank.write(tmp_path)
    merge, events = merged(tmp_path)

    def kept(event):
        return json.dumps({k: v for k, v in event.items() if k not in ("ts", "id")}, sort_keys=True)

    before = [e for rank in ranks for e in rank.events if e["name"] != "asyncddp.clock"]
    after = [e for e in events if e["name"] not in ("asyncddp.merged", "asyncddp.arrows")]
    assert sorted(map(kept, before)) == sorted(map(kept, after))
    assert merge.arrows.dropped == 0
    assert events[-1]["args"] == {"kept": 24, "dropped": 0}


def test_arrows_have_both_ends_and_a_number_each(tmp_path):
    """Perfetto takes numbers for names of arrows, and drops others."""
    for rank in straggling():
        rank.write(tmp_path)
    _, events = merged(tmp_path)
    tails, heads = ({e["id"]: e for e in of(events, ph=phase)} for phase in "sf")
    assert tails.keys() == heads.keys() == set(range(1, 25))
    for number, tail in tails.items():
        assert heads[number]["pid"] == (tail["pid"] + 1) % 4
        assert heads[number]["ts"] > tail["ts"]
        assert heads[number]["bp"] == "e"


def test_arrows_of_a_missing_rank_are_dropped_and_counted_and_the_rank_is_named(tmp_path):
    """Without one rank's file, its arrows are dropped and counted and the rank is listed."""
    for rank in straggling()[:3]:
        rank.write(tmp_path)
    merge, events = merged(tmp_path)
    assert merge.missing == [3]
    assert events[0]["args"]["missing"] == [3]
    assert events[0]["args"]["size"] == 4
    assert (merge.arrows.kept, merge.arrows.dropped) == (12, 12)
    assert events[-1]["args"] == {"kept": 12, "dropped": 12}
    assert len(of(events, cat="message")) == 24


def test_an_end_that_arrives_first_waits_for_its_other_end():
    """Clocks are never right to the microsecond, so that a message may seem to come too early."""
    arrows = FlowArrowMatcher()
    events = [{"ph": "f", "id": "a", "ts": 1.0}, {"ph": "s", "id": "a", "ts": 2.0}]
    assert [event["ph"] for event in arrows.matched(events)] == ["s", "f"]
    assert (arrows.kept, arrows.dropped) == (1, 0)


def test_no_more_ends_wait_than_may():
    """At most ``held`` arrow ends wait for their other end; the oldest is dropped."""
    arrows = FlowArrowMatcher(held=10)
    lost = [{"ph": "s", "id": str(k)} for k in range(100)]
    late = [{"ph": "f", "id": "99"}, {"ph": "f", "id": "0"}]
    assert [event["ph"] for event in arrows.matched([*lost, *late])] == ["s", "f"]
    assert (arrows.kept, arrows.dropped) == (1, 100)


def test_a_file_may_end_anywhere(tmp_path):
    """A rank that is killed leaves whole lines and, at worst, the beginning of one."""
    path = tmp_path / "rank0.json"
    rank = Rank(0).clock(0.0).span("step", 0.0, 5.0).span("step", 5.0, 9.0)
    text = rank.text(whole=False)
    whole = list(read_events(rank.write(tmp_path)))
    assert len(whole) == len(rank.events)
    for end in range(text.index('"step"'), len(text) + 1):
        path.write_text(text[:end])
        events = list(read_events(path))
        assert events == whole[: len(events)]
        assert len(events) >= text[:end].count("},\n")


def test_killed_ranks_are_merged_with_the_others(tmp_path):
    """A torn last line loses none of a killed rank's earlier spans in the merge."""
    ranks = straggling()
    for rank in ranks:
        path = rank.write(tmp_path, whole=rank.rank != 2)
        if rank.rank == 2:
            path.write_text(path.read_text()[:-30])
    _, events = merged(tmp_path)
    assert len(of(events, cat="step", pid=1)) == len(of(events, cat="step", pid=2)) == 6


def test_a_line_that_is_torn_in_the_middle_is_an_error_that_names_it_and_nothing_is_written(
    tmp_path,
):
    """A torn line before the last raises ArgumentError with its number; nothing is written."""
    path = Rank(0).clock(0.0).span("step", 0.0, 5.0).span("step", 5.0, 9.0).write(tmp_path)
    lines = path.read_text().splitlines()
    lines[4] = lines[4][:40]
    path.write_text("\n".join(lines))
    with pytest.raises(ArgumentError, match=r"rank0\.json, line 5 is no trace event; expected"):
        write_merged_trace(open_traces([path]), tmp_path / "trace.json")
    assert [left.name for left in tmp_path.iterdir()] == ["rank0.json"]


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_json_is_no_event(tmp_path, constant):
    """NaN and infinities, which strict JSON lacks, make a line an ArgumentError."""
    path = Rank(0).clock(0.0).span("step", 0.0, 5.0).span("step", 5.0, 9.0).write(tmp_path)
    path.write_text(path.read_text().replace('"dur": 5.0', f'"dur": {constant}'))
    with pytest.raises(ArgumentError, match="line 5 is no trace event"):
        list(read_events(path))


def test_packed_files_are_written_and_read(tmp_path):
    """Gzipped traces hold the same as plain ones; a truncated one raises ArgumentError."""
    for rank in straggling():
        path = rank.write(tmp_path)
        with gzip.open(f"{path}.gz", "wt") as packed:
            packed.write(path.read_text())
        path.unlink()
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    for path in (plain, packed):
        write_merged_trace(open_traces([tmp_path]), path)
        assert is_merged(path)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert list(read_events(packed)) == list(read_events(plain))
    packed.write_bytes(packed.read_bytes()[:200])
    with pytest.raises(ArgumentError, match=r"t\.json\.gz cannot be read: "):
        list(read_events(packed))


def test_merging_holds_a_line_per_file_and_no_more(tmp_path):
    """Merging traces of over 1.5 MB allocates less than 0.3 MB at any time."""
    for number in (0, 1):
        rank = Rank(number, 2).clock(0.0)
        for k in range(700):
            rank.span("forward", 10.0 * k, 10.0 * k + 5, called=f"layers.{k % 50}", text="x" * 1000)
            rank.arrow("sf"[number], 10.0 * k, f"0>1:{k}")
        rank.write(tmp_path)
        del rank
    nbytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    tracemalloc.start()
    try:
        write_merged_trace(open_traces([tmp_path]), tmp_path / "trace.json")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert nbytes > 1.5e6
    assert peak < 0.3e6


def test_progress_ends_at_the_size_of_each_file(tmp_path):
    """The last progress reported of each file is its size in bytes."""
    paths = [rank.write(tmp_path) for rank in straggling()]
    seen = {}
    write_merged_trace(open_traces(paths), tmp_path / "trace.json", seen.__setitem__)
    assert seen == {path: path.stat().st_size for path in paths}


def test_a_rank_that_did_not_measure_has_the_clock_of_its_machine(tmp_path):
    """A rank without measurements is aligned by those of another rank on its machine."""
    Rank(0, 3, "a").clock(0.0).span("step", 100.0, 200.0).write(tmp_path)
    Rank(1, 3, "b", ahead=5e6).clock(0.0, 9.0).span("step", 100.0, 200.0).write(tmp_path)
    Rank(2, 3, "b", ahead=5e6).span("step", 100.0, 200.0).write(tmp_path)
    merge, events = merged(tmp_path)
    assert [span["ts"] for span in of(events, name="step")] == pytest.approx([100.0] * 3)
    assert merge.unmeasured == []
    assert merge.clock_error == pytest.approx(9.0 + 1e-4 * 100, abs=0.02)


def test_a_clock_that_is_shared_is_exact_however_badly_it_was_measured(tmp_path):
    """Ranks of one machine have one clock; a busy machine measures it late."""
    Rank(0, 3, "a").clock(0.0, 0.0).span("step", 100.0, 200.0).write(tmp_path)
    for number, host in ((1, "a"), (2, "b")):
        rank = Rank(number, 3, host).span("step", 100.0, 200.0).clock(200.0, 300.0)
        rank.events[-1]["args"]["offset"] = 250.0
        rank.write(tmp_path)
    merge, events = merged(tmp_path)
    assert {span["pid"]: span["ts"] for span in of(events, name="step")} == {
        0: 100.0, 1: 100.0, 2: 350.0,
    }  # fmt: skip
    assert merge.clock_error == pytest.approx(300.0, abs=0.1)
    other = tmp_path / "other"
    other.mkdir()
    Rank(0, 2, "a").clock(0.0, 0.0).span("step", 100.0, 200.0).write(other)
    Rank(1, 2, "a", ahead=9e9).clock(0.0, 3.0).span("step", 100.0, 200.0).write(other)
    merge, events = merged(other)
    assert [span["ts"] for span in of(events, name="step")] == pytest.approx([100.0] * 2)
    assert merge.clock_error == 3.0


def test_a_machine_on_which_nobody_measured_is_placed_by_its_wall_clock_and_named(tmp_path):
    """A machine without measurements is aligned by wall clock, and no error bound is given."""
    Rank(0, 2, "a", started_unix=1000.0).clock(0.0).span("step", 0.0, 9.0).write(tmp_path)
    late = Rank(1, 2, "b", ahead=4e8, started_unix=1000.25)
    late.span("step", 7e6, 8e6).write(tmp_path)
    merge, events = merged(tmp_path)
    assert merge.unmeasured == [1]
    assert merge.clock_error is None
    assert of(events, name="step", pid=1)[0]["ts"] == pytest.approx(0.25e6)


def test_folders_prefixes_and_names_lead_to_files_in_order_of_rank(tmp_path):
    """Folders and prefixes give files sorted by rank, names in order given, none twice."""
    folder = tmp_path / "out"
    folder.mkdir()
    for rank in (10, 2, 0):
        for name in (f"rank{rank}.json", f"bf_{rank}.json", f"bf_1{rank}.json.part"):
            (folder / name).write_text("[")
    (folder / "trace.json").write_text("[")

    def names(*sources):
        return [path.name for path in find_trace_files(sources)]

    assert names(folder) == ["rank0.json", "rank2.json", "rank10.json"]
    assert names(folder / "bf_") == ["bf_0.json", "bf_2.json", "bf_10.json"]
    assert names(folder / "rank2.json", folder / "rank0.json") == ["rank2.json", "rank0.json"]
    assert names(folder, folder / "rank0.json") == names(folder)


def test_what_leads_to_no_file_is_an_error_that_says_what_would(tmp_path):
    """A source without traces raises ArgumentError that says what to give instead."""
    with pytest.raises(ArgumentError, match=r"no such folder: '.*/none'; .* --timeline DIR"):
        find_trace_files([tmp_path / "none" / "bf_"])
    with pytest.raises(ArgumentError, match=r"no such file or folder: '.*/bf_', nor '.*/bf_0\.jso"):
        find_trace_files([tmp_path / "bf_"])
    with pytest.raises(ArgumentError, match=r"no rank0\.json, rank1\.json, … in .*; ranks write "):
        find_trace_files([tmp_path])
    (tmp_path / "bf_0.json").write_text("[")
    with pytest.raises(ArgumentError, match=r"There is .*bf_0\.json: give its prefix, .*/bf_\."):
        find_trace_files([tmp_path])
    with pytest.raises(ArgumentError, match="timelines of no rank were given"):
        open_traces([])


PROFILE = '{\n  "schemaVersion": 1,\n  "traceEvents": [\n  {\n    "ph": "X"\n  }\n ]\n}\n'


@pytest.mark.parametrize(
    "text", ["hello\n", "[\n1,\n2\n]\n", PROFILE, '[\n{"ph": "X", "ts": 1.0}\n]\n', "\0\xff"]
)
def test_what_is_no_timeline_is_named(tmp_path, text):
    """A file in another format raises ArgumentError that names it."""
    path = tmp_path / "rank0.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"rank0\.json is not a rank's timeline: it has no "):
        open_traces([path])


def test_a_later_version_of_the_format_is_named(tmp_path):
    """A trace of a later format version raises ArgumentError that tells both versions."""
    path = Rank(0).write(tmp_path)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ArgumentError, match="has version 2 of the format, and this asyncddp reads"):
        open_traces([path])


def test_an_empty_file_is_a_missing_rank_and_only_empty_files_are_an_error(tmp_path):
    """A file without events is a missing rank, and an error where no file has any."""
    for text in ("", "[\n", "[\n]\n"):
        (tmp_path / "rank1.json").write_text(text)
        with pytest.raises(ArgumentError, match=r"rank1\.json: empty; the run was ended before"):
            open_traces([tmp_path / "rank1.json"])
        Rank(0, 2).clock(0.0).span("step", 0.0, 1.0).write(tmp_path)
        merge = open_traces([tmp_path])
        assert [path.name for path in merge.silent] == ["rank1.json"]
        assert merge.missing == [1]


def test_files_that_do_not_belong_together_are_named(tmp_path):
    """Two files of one rank, or of runs of different sizes, raise ArgumentError."""
    Rank(0, 2).write(tmp_path)
    Rank(0, 2).write(tmp_path, "other.json")
    with pytest.raises(ArgumentError, match=r"rank0\.json and .*other\.json are both of rank 0; g"):
        open_traces([tmp_path / "rank0.json", tmp_path / "other.json"])
    Rank(3, 4).write(tmp_path)
    with pytest.raises(ArgumentError, match=r"of a run with 2 ranks, .* of one with 4; remove the"):
        open_traces([tmp_path])


def test_a_merged_file_is_not_merged_again(tmp_path):
    """A merged trace is told from a rank's, and merging it again raises ArgumentError."""
    Rank(0).clock(0.0).span("step", 0.0, 1.0).write(tmp_path)
    merged(tmp_path)
    assert is_merged(tmp_path / "trace.json")
    assert not is_merged(tmp_path / "rank0.json")
    with pytest.raises(ArgumentError, match=r"is merged already; open it at ui\.perfetto\.dev, or"):
        open_traces([tmp_path / "trace.json"])


def test_a_rank_that_did_nothing_has_a_place(tmp_path):
    """A rank without spans begins at its clock measurement, where rank 0's is time 0."""
    Rank(0, 2).clock(7.0).write(tmp_path)
    Rank(1, 2).clock(8.0).span("step", 9.0, 11.0).write(tmp_path)
    found = scan_trace(tmp_path / "rank0.json")
    assert (found.start, found.first, found.last) == (7.0, 7.0, 7.0)
    _, events = merged(tmp_path)
    assert of(events, name="step")[0]["ts"] == 2.0


def test_the_files_to_merge_are_not_written_over(tmp_path):
    """Writing the merge to one of its sources raises ArgumentError and leaves it as it was."""
    path = Rank(0).clock(0.0).span("step", 0.0, 1.0).write(tmp_path)
    text = path.read_text()
    with pytest.raises(ArgumentError, match=r"rank0\.json is one of the files to merge; write to "):
        write_merged_trace(open_traces([path]), tmp_path / "x" / ".." / "rank0.json")
    with pytest.raises(ArgumentError, match=r"none/trace\.json cannot be written: .*No such file"):
        write_merged_trace(open_traces([path]), tmp_path / "none" / "trace.json")
    assert path.read_text() == text
