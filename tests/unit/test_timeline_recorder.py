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
from asyncddp.context import clock
from asyncddp.context.clock import measure
from asyncddp.timeline.clock import Sample
from asyncddp.timeline.notes import Lines, Mark, Span
from asyncddp.timeline.recorder import Recorder
from asyncddp.timeline.starting import file_of, recorder_for
from asyncddp.timeline.tracks import LANE, activity, caller
from asyncddp.timeline.writer import Writer
from asyncddp.transport.loopback import Loopback
from tests.support.timelines import arrows, assert_balanced, assert_nested, read, spans


@pytest.fixture
def recorder(tmp_path):
    """A recorder of rank 3 that writes into the test's folder."""
    opened = Recorder(3, Writer(tmp_path / "3.json", 3))
    yield opened
    opened.close()


def written(recorder):
    recorder.close()
    return read(recorder._writer.path)


# lines


@pytest.mark.parametrize(
    "note",
    [
        Span("mix", 'a "name"\n', 2, 1_234, 5_678, {"bytes": 3, "for": [1, 2], "x": 0.5}),
        Span("step", "step", 1, 0, 1, {"step": 0, "modules": True, "none": None, "é": "ü\\"}),
        Mark("B", "LOAD", 10, 17),
        Mark("M", "thread_name", 1, None, {"name": "computation"}),
    ],
)
def test_every_line_is_json(note):
    """Whatever is in names and facts; times are microseconds with three decimals."""
    (line,) = Lines(7).of(note)
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
    lines = Lines(0)
    times = [(0, 50), (10, 60), (50, 70), (65, 80)]
    every = [json.loads(x) for t in times for x in lines.of(Span("transfer", "send", LANE, *t))]
    assert [event["tid"] for event in every if event["ph"] == "X"] == [100, 101, 100, 101]
    titles = [event["args"]["name"] for event in every if event["name"] == "thread_name"]
    assert titles == ["transfer 0", "transfer 1"]


def test_tracks_never_meet():
    """However many activities and threads there are."""
    taken = {1, 2, 3, *range(100, 5000)}
    for number in range(3000):
        for track in (activity(number), caller(number)):
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
    assert file_of(where, 2) == Path(name)


def test_a_file_that_cannot_be_made_is_a_mistake_at_the_door(tmp_path):
    """It names the variable, what was expected, and why."""
    (tmp_path / "file").write_text("")
    config = Config(timeline=f"{tmp_path}/file/")
    with pytest.raises(bf.ArgumentError) as caught:
        recorder_for(config, 1, 2)
    assert str(caught.value) == (
        "ASYNCDDP_TIMELINE: expected a folder or prefix that rank 1 can write to, got "
        f"'{tmp_path}/file/rank1.json': File exists"
    )


def test_it_is_off_unless_asked_for():
    """No recorder, and nothing that would have to be asked whether it is on."""
    assert recorder_for(Config(), 0, 1) is None
    assert Config.from_environment({"ASYNCDDP_TIMELINE": ""}).timeline is None
    with bf.local_world(2) as world:
        engines = world.run(lambda: bf.current().engine)
    for engine in engines:
        assert engine.recorder is engine.mailbox.recorder is engine.mailbox.channels.recorder
        assert engine.recorder is None


def test_notes_are_in_the_file_soon_and_it_can_be_read_meanwhile(recorder):
    """Without the end, as a run that is killed leaves it."""
    recorder.span("step", "step", 0, 1000, {"step": 0})
    limit = time.monotonic() + 60.0
    while '"step": 0' not in recorder._writer.path.read_text() and time.monotonic() < limit:
        time.sleep(0.005)
    assert spans(read(recorder._writer.path, ended=False), "step")
    assert recorder._writer.path.read_text().endswith("},\n")
    assert spans(written(recorder), "step")


def test_a_flush_has_every_note_in_the_file_at_once(recorder):
    """Also while the thread that writes is at it; in the order of the notes."""
    path = recorder._writer.path
    for count in range(1, 21):
        for k in range(50):
            recorder.span("step", "step", k, k + 1, {"count": count})
        recorder.flush()
        assert path.read_text().count('"name": "step"') == 50 * count
    found = [span["args"]["count"] for span in spans(written(recorder), "step")]
    assert found == sorted(found)
    recorder.flush()


def test_a_full_disk_ends_the_timeline_with_one_warning(caplog):
    """Whoever takes notes goes on, and nothing piles up."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    recorder = Recorder(0, Writer(full, 0))
    limit = time.monotonic() + 60.0
    while not recorder._writer._file.closed and time.monotonic() < limit:
        recorder.span("step", "step", 0, 1)
    for _ in range(100):
        recorder.span("step", "step", 0, 1)
    assert not recorder._writer._notes
    recorder.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "rank 0: /dev/full cannot be written any more, so that the timeline ends" in caplog.text


# notes


def test_pieces_that_follow_each_other_are_mixed_in_one_span(recorder):
    """Of one verb and name, with all their bytes."""
    for begin in (0, 2_000, 4_000, 900_000):
        recorder.mixed("neighbor_allreduce", "x", begin, begin + 1_500, 8, (1,))
    recorder.mixed("neighbor_allreduce", "y", 902_000, 903_000, 8, (1,))
    found = spans(written(recorder), "mix")
    facts = [(e["ts"], e["dur"], e["args"]["name"], e["args"]["bytes"]) for e in found]
    assert facts == [(0.0, 5.5, "x", 24), (900.0, 1.5, "x", 8), (902.0, 1.0, "y", 8)]


def test_what_is_mixed_is_no_waiting(recorder):
    """A wait ends where something is mixed, and goes on with those who are late then."""
    with recorder.enqueued("neighbor_allreduce", "x", 8):
        waiting = recorder.waiting("neighbor_allreduce", "x")
        waiting.late([1, 2])
        waiting.late([1])
        time.sleep(0.002)
        begin = time.monotonic_ns()
        time.sleep(0.001)
        recorder.mixed("neighbor_allreduce", "x", begin, time.monotonic_ns(), 8, (1,))
        waiting.late([4])
        time.sleep(0.001)
        waiting.end()
    events = written(recorder)
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


def test_a_wait_inside_a_wait_is_noted_once(recorder):
    """The inner one, which knows more."""
    outer = recorder.waiting("v", "x", (1,))
    inner = recorder.waiting("v", "x", (2,))
    time.sleep(0.001)
    inner.end()
    outer.end()
    events = written(recorder)
    assert [wait["args"]["for"] for wait in spans(events, "wait")] == [[2]]


def test_messages_have_the_same_name_at_both_ends(tmp_path):
    """It tells sender, receiver, name and number."""
    ends = [Recorder(rank, Writer(tmp_path / f"{rank}.json", rank)) for rank in (0, 1)]
    ends[0].transfer("send", "v", "x", 1, 8, 0, 10, 5)
    ends[1].transfer("receive", "v", "x", 0, 8, 5, 15, 5)
    sent, received = (written(end) for end in ends)
    assert list(arrows(sent, "s")) == list(arrows(received, "f")) == ["0>1 x 5"]


def test_activities_are_balanced_and_have_a_row_for_each_thread(recorder):
    """What is open in the end is ended; what never began cannot end."""
    assert recorder.end_activity("x") is False

    def other():
        recorder.start_activity("x", "THERE")
        recorder.end_activity("x")

    recorder.start_activity("x", "OUTER")
    recorder.start_activity("x", "INNER")
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert recorder.end_activity("x") is True
    recorder.start_activity("y", "LEFT OPEN")
    events = written(recorder)
    assert_balanced(events)
    begun = [(event["name"], event["tid"]) for event in events if event["ph"] == "B"]
    assert begun == [("OUTER", 10), ("INNER", 10), ("THERE", 11), ("LEFT OPEN", 12)]


def test_threads_that_communicate_have_tracks_of_their_own(recorder):
    """The next one takes over from one of those that have ended: which, the system decides."""

    def spans_of(count):
        def note():
            recorder.span("enqueue", "E", 0, 1)
            gate.wait()

        gate = threading.Barrier(count)
        threads = [threading.Thread(target=note) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    spans_of(2)
    spans_of(1)
    tracks = [event["tid"] for event in spans(written(recorder), "enqueue")]
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
    assert recorder_for(Config(nvtx=True), 0, 1) is None


# clocks


def test_clocks_of_threads_are_one_clock():
    """The offset is zero within the error that the measurement tells itself."""
    ends = Loopback.group(3)
    found = {}

    def ask(rank):
        found[rank] = measure(ends[rank], (0, 2), 10.0)

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
        sample = Sample.of(asked, answered + ahead, heard)
        assert abs(sample.offset - ahead) <= sample.error


def test_clocks_are_compared_again_and_again(tmp_path, monkeypatch):
    """By messages that whoever drives rank 0 answers; what took too long is left out."""
    monkeypatch.setattr(clock, "_EVERY", 0)
    monkeypatch.setattr(clock, "_TRIES", 1)

    def case():
        until = time.monotonic() + 0.4
        while bf.allreduce(torch.tensor(float(time.monotonic() < until))) == 1.0:
            pass

    for fine, more in ((10**12, True), (-1, False)):
        monkeypatch.setattr(clock, "_FINE", fine)
        monkeypatch.setattr(clock, "_GOOD", 0)
        with bf.local_world(2, timeline=f"{tmp_path}/{more}/") as world:
            world.run(case)
        found = [read(tmp_path / str(more) / f"rank{rank}.json") for rank in (0, 1)]
        measured = [[e for e in events if e["name"] == "asyncddp.clock"] for events in found]
        assert len(measured[0]) == 1
        assert (len(measured[1]) > 1) == more
        for event in measured[1]:
            assert abs(event["args"]["offset"]) <= event["args"]["error"] + 0.001
