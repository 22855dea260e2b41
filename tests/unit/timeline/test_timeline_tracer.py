"""What a rank notes down: every note is a line, soon, and whoever takes it never pays or fails."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from pathlib import Path

import pytest
import torch

import asyncddp as bf
from asyncddp.config import Config
from asyncddp.context import clock_sync
from asyncddp.context.clock_sync import measure_clock_offset
from asyncddp.engine.tracing import NO_TRACING
from asyncddp.timeline.chrome_trace import ChromeTraceFormatter, SingleTimestampEvent, Span
from asyncddp.timeline.trace_writer import TraceWriter
from asyncddp.timeline.tracer import ClockSample, Tracer, create_tracer, trace_path
from asyncddp.timeline.tracks import TRANSFER_TRACK, activity_track, thread_track
from asyncddp.transport.loopback import LoopbackTransport
from tests.support.timelines import arrows, assert_balanced, assert_nested, read, spans


@pytest.fixture
def tracer(tmp_path):
    """A recorder of rank 3 that writes into the test's folder."""
    opened = Tracer(3, TraceWriter(tmp_path / "3.json", 3))
    yield opened
    opened.close()


def written(tracer):
    tracer.close()
    return read(tracer._writer.path)


# lines


@pytest.mark.parametrize(
    "note",
    [
        Span("mix", 'a "name"\n', 2, 1_234, 5_678, {"bytes": 3, "for": [1, 2], "x": 0.5}),
        Span("step", "step", 1, 0, 1, {"step": 0, "modules": True, "none": None, "é": "ü\\"}),
        SingleTimestampEvent("B", "LOAD", 10, 17),
        SingleTimestampEvent("M", "thread_name", 1, None, {"name": "computation"}),
    ],
)
def test_every_line_is_json(note):
    """Whatever is in names and facts; times are microseconds with three decimals."""
    (line,) = ChromeTraceFormatter(7).format(note)
    event = json.loads(line)
    assert event["pid"] == 7
    assert event["tid"] == note.track
    assert event["name"] == note.name
    assert event.get("args") == (None if note.args is None else dict(note.args))
    if isinstance(note, Span):
        assert event["ts"] == note.begin / 1000
        assert event["dur"] == (note.end - note.begin) / 1000


def test_transfers_at_one_time_are_on_tracks_of_their_own():
    """A track is used again when it is free, and gets its title first."""
    lines = ChromeTraceFormatter(0)
    times = [(0, 50), (10, 60), (50, 70), (65, 80)]
    every = [
        json.loads(x)
        for t in times
        for x in lines.format(Span("transfer", "send", TRANSFER_TRACK, *t))
    ]
    assert [event["tid"] for event in every if event["ph"] == "X"] == [100, 101, 100, 101]
    titles = [event["args"]["name"] for event in every if event["name"] == "thread_name"]
    assert titles == ["transfer 0", "transfer 1"]


def test_tracks_never_meet():
    """However many activities and threads there are."""
    taken = {1, 2, 3, *range(100, 5000)}
    for number in range(3000):
        for track in (activity_track(number), thread_track(number)):
            assert track not in taken
            taken.add(track)


# files


@pytest.mark.parametrize(
    ("where", "name"),
    [("new/", "new/rank2.json"), ("a-", "a-2.json"), (".", "rank2.json"), ("{rank}x", "2x")],
)
def test_a_folder_or_a_prefix(where, name, tmp_path, monkeypatch):
    """What ends with a separator or is there is a folder."""
    monkeypatch.chdir(tmp_path)
    assert trace_path(where, 2) == Path(name)


def test_a_file_that_cannot_be_made_is_refused_at_once(tmp_path):
    """It names the variable, what was expected, and why."""
    (tmp_path / "file").write_text("")
    config = Config(timeline=f"{tmp_path}/file/")
    with pytest.raises(bf.ArgumentError) as caught:
        create_tracer(config, 1, 2)
    assert str(caught.value) == (
        "ASYNCDDP_TIMELINE: expected a folder or prefix that rank 1 can write to, got "
        f"'{tmp_path}/file/rank1.json': File exists"
    )


def test_it_is_off_unless_asked_for():
    """No recorder, and nothing that would have to be asked whether it is on."""
    assert create_tracer(Config(), 0, 1) is None
    assert Config.from_environment({"ASYNCDDP_TIMELINE": ""}).timeline is None
    with bf.local_world(2) as world:
        engines = world.run(lambda: bf.current().engine)
    for engine in engines:
        assert engine.tracing is engine.matcher.channels.tracing is NO_TRACING


def test_notes_are_in_the_file_soon_and_it_can_be_read_meanwhile(tracer):
    """Without the end, as a run that is killed leaves it."""
    tracer.record_span("step", "step", 0, 1000, {"step": 0})
    limit = time.monotonic() + 60.0
    while '"step": 0' not in tracer._writer.path.read_text() and time.monotonic() < limit:
        time.sleep(0.005)
    assert spans(read(tracer._writer.path, ended=False), "step")
    assert tracer._writer.path.read_text().endswith("},\n")
    assert spans(written(tracer), "step")


def test_a_flush_has_every_note_in_the_file_at_once(tracer):
    """Also while the thread that writes is at it; in the order of the notes."""
    path = tracer._writer.path
    for count in range(1, 21):
        for k in range(50):
            tracer.record_span("step", "step", k, k + 1, {"count": count})
        tracer.flush()
        assert path.read_text().count('"name": "step"') == 50 * count
    found = [span["args"]["count"] for span in spans(written(tracer), "step")]
    assert found == sorted(found)
    tracer.flush()


def test_a_full_disk_ends_the_timeline_with_one_warning(caplog):
    """Whoever takes notes goes on, and nothing piles up."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    tracer = Tracer(0, TraceWriter(full, 0))
    limit = time.monotonic() + 60.0
    while not tracer._writer._file.closed and time.monotonic() < limit:
        tracer.record_span("step", "step", 0, 1)
    for _ in range(100):
        tracer.record_span("step", "step", 0, 1)
    assert not tracer._writer._events
    tracer.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "rank 0: /dev/full cannot be written any more, so that the timeline ends" in caplog.text


# notes


def test_pieces_that_follow_each_other_are_mixed_in_one_span(tracer):
    """Of one verb and name, with all their bytes."""
    for begin in (0, 2_000, 4_000, 900_000):
        tracer.record_mix("neighbor_allreduce", "x", begin, begin + 1_500, 8, (1,))
    tracer.record_mix("neighbor_allreduce", "y", 902_000, 903_000, 8, (1,))
    found = spans(written(tracer), "mix")
    facts = [(e["ts"], e["dur"], e["args"]["name"], e["args"]["bytes"]) for e in found]
    assert facts == [(0.0, 5.5, "x", 24), (900.0, 1.5, "x", 8), (902.0, 1.0, "y", 8)]


def test_what_is_mixed_is_no_waiting(tracer):
    """A wait ends where something is mixed, and goes on with those who are late then."""
    with tracer.enqueue_span("neighbor_allreduce", "x", 8):
        waiting = tracer.start_wait("neighbor_allreduce", "x")
        waiting.note_missing([1, 2])
        waiting.note_missing([1])
        time.sleep(0.002)
        begin = time.monotonic_ns()
        time.sleep(0.001)
        tracer.record_mix("neighbor_allreduce", "x", begin, time.monotonic_ns(), 8, (1,))
        waiting.note_missing([4])
        time.sleep(0.001)
        waiting.end()
    events = written(tracer)
    waits, (mix,) = spans(events, "wait"), spans(events, "mix")
    assert [wait["args"]["for"] for wait in waits] == [[2, 1], [4]]
    assert waits[0]["ts"] + waits[0]["dur"] == pytest.approx(mix["ts"], abs=0.01)
    assert waits[1]["ts"] == pytest.approx(mix["ts"] + mix["dur"], abs=0.01)
    (call,) = spans(events, "enqueue")
    assert call["name"] == "ENQUEUE_NEIGHBOR_ALLREDUCE"
    assert call["args"] == {
        "verb": "neighbor_allreduce",
        "name": "x",
        "bytes": 8,
        "op": "MPI_NEIGHBOR_ALLREDUCE",
    }
    assert_nested(events)


def test_a_wait_inside_a_wait_is_noted_once(tracer):
    """The inner one, which knows more."""
    outer = tracer.start_wait("v", "x", (1,))
    inner = tracer.start_wait("v", "x", (2,))
    time.sleep(0.001)
    inner.end()
    outer.end()
    events = written(tracer)
    assert [wait["args"]["for"] for wait in spans(events, "wait")] == [[2]]


def test_messages_have_the_same_name_at_both_ends(tmp_path):
    """It tells sender, receiver, name and number."""
    ends = [Tracer(rank, TraceWriter(tmp_path / f"{rank}.json", rank)) for rank in (0, 1)]
    ends[0].record_transfer("send", "v", "x", 1, 8, 0, 10, 5)
    ends[1].record_transfer("receive", "v", "x", 0, 8, 5, 15, 5)
    sent, received = (written(end) for end in ends)
    assert list(arrows(sent, "s")) == list(arrows(received, "f")) == ["0>1 x 5"]


def test_activities_are_balanced_and_have_a_row_for_each_thread(tracer):
    """What is open in the end is ended; what never began cannot end."""
    assert tracer.end_activity("x") is False

    def other():
        tracer.start_activity("x", "THERE")
        tracer.end_activity("x")

    tracer.start_activity("x", "OUTER")
    tracer.start_activity("x", "INNER")
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert tracer.end_activity("x") is True
    tracer.start_activity("y", "LEFT OPEN")
    events = written(tracer)
    assert_balanced(events)
    begun = [(event["name"], event["tid"]) for event in events if event["ph"] == "B"]
    assert begun == [("OUTER", 10), ("INNER", 10), ("THERE", 11), ("LEFT OPEN", 12)]


def test_threads_that_communicate_have_tracks_of_their_own(tracer):
    """The next one takes over from one of those that have ended: which, the system decides."""

    def spans_of(count):
        def note():
            tracer.record_span("enqueue", "E", 0, 1)
            gate.wait()

        gate = threading.Barrier(count)
        threads = [threading.Thread(target=note) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    spans_of(2)
    spans_of(1)
    tracks = [event["tid"] for event in spans(written(tracer), "enqueue")]
    assert sorted(tracks[:2]) == [2, 50]
    assert tracks[2] in (2, 50)


# other people's tools


@pytest.mark.parametrize("on", [False, True])
def test_names_are_in_a_profile_of_torch(on, tmp_path):
    """As in the timeline, whether that is on or off; once for each call."""
    if not hasattr(torch.autograd.profiler, "_is_profiler_enabled"):
        pytest.fail("torch says no more whether its profiler is on")

    def case():
        with torch.profiler.profile() as profile:
            for _ in range(3):
                bf.neighbor_allreduce(torch.ones(1))
        return {event.key: event.count for event in profile.key_averages()}

    with bf.local_world(1, timeline=f"{tmp_path}/" if on else None) as world:
        (counts,) = world.run(case)
    assert counts["ENQUEUE_NEIGHBOR_ALLREDUCE"] == 3


def test_nvtx_without_cuda_means_nothing():
    """Marks need somebody to see them."""
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    assert create_tracer(Config(nvtx=True), 0, 1) is None


# clocks


def test_clocks_of_threads_are_one_clock():
    """The offset is zero within the error that the measurement tells itself."""
    ends = LoopbackTransport.group(3)
    found = {}

    def ask(rank):
        found[rank] = measure_clock_offset(ends[rank], (0, 2), 10.0)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0][1:] == (0, 0)
    assert found[1] is None
    assert abs(found[2].offset) <= found[2].error
    assert math.isfinite(found[2].error)


def test_an_offset_is_never_outside_of_its_error():
    """Whenever the answer was given between question and arrival."""
    ahead = 12_345
    for asked, answered, heard in ((0, 0, 10), (0, 10, 10), (5, 6, 105), (7, 7, 8)):
        sample = ClockSample.from_round_trip(asked, answered + ahead, heard)
        assert abs(sample.offset - ahead) <= sample.error


def test_clocks_are_compared_again_and_again(tmp_path, monkeypatch):
    """By messages that whoever drives rank 0 answers; what took too long is left out."""
    monkeypatch.setattr(clock_sync, "_INTERVAL", 0)
    monkeypatch.setattr(clock_sync, "_MAX_QUERIES", 1)

    def case():
        until = time.monotonic() + 0.4
        while bf.allreduce(torch.tensor(float(time.monotonic() < until))) == 1.0:
            pass

    for fine, more in ((10**12, True), (-1, False)):
        monkeypatch.setattr(clock_sync, "_MAX_ERROR", fine)
        monkeypatch.setattr(clock_sync, "_MAX_ERROR_RATIO", 0)
        with bf.local_world(2, timeline=f"{tmp_path}/{more}/") as world:
            world.run(case)
        found = [read(tmp_path / str(more) / f"rank{rank}.json") for rank in (0, 1)]
        measured = [[e for e in events if e["name"] == "asyncddp.clock"] for events in found]
        assert len(measured[0]) == 1
        assert (len(measured[1]) > 1) == more
        for event in measured[1]:
            assert abs(event["args"]["offset"]) <= event["args"]["error"] + 0.001
