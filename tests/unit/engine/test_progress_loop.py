"""What counts as progress of an operation: for the thread that drives it, and for its deadline."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from asyncddp import deadline
from asyncddp.config import Config
from asyncddp.device.stream_interfaces import StreamOrdering
from asyncddp.engine import OperationSpec, ProgressEngine, watchdog
from asyncddp.engine.messages import ExchangeSignature
from asyncddp.errors import WaitTimeoutError
from asyncddp.transport.cuda import staged_transport
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport
from asyncddp.transport.loopback import LoopbackTransport
from tests.support.simulated_streams import SimulatedStreams

TIMEOUT = 10.0
FORM = ExchangeSignature("slow", "float32", (2,))


class Transfer:
    """A transfer of several pieces, the next of which ends when it is asked after a while."""

    def __init__(self, pieces):
        self.pieces, self.moves = pieces, 0

    def done(self):
        return self.moves == self.pieces

    def abandon(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    """The clock of deadlines, which a test sets."""
    now = SimpleNamespace(monotonic=lambda: now.seconds, seconds=100.0)
    monkeypatch.setattr(deadline, "time", now)
    monkeypatch.setattr(watchdog, "time", now)
    return now


def begun(transfer, ordering=None):
    """The engine of a rank of its own, and a handle of an operation that waits for a transfer."""

    def steps(operation):
        yield from operation.collective([0], FORM, lambda: transfer)
        return "over"

    engine = ProgressEngine(LoopbackTransport.group(1)[0], Config(timeout=TIMEOUT, warn_after=60.0))
    return engine, engine.submit(OperationSpec("slow", steps, stream_ordering=ordering))


def test_a_transfer_may_last_longer_than_its_deadline_while_pieces_end(clock):
    """No gap between two pieces is longer than the timeout, and all of them are: it ends well."""
    transfer = Transfer(pieces=20)
    engine, handle = begun(transfer)
    for _ in range(transfer.pieces):
        clock.seconds += 0.9 * TIMEOUT
        engine.progress()
        assert not handle.poll()
        transfer.moves += 1
    assert handle.wait() == "over"


def test_a_transfer_whose_pieces_stop_fails_at_its_deadline(clock):
    """It raises within two timeouts after its last piece, and says that it had made progress."""
    transfer = Transfer(pieces=20)
    engine, handle = begun(transfer)
    for _ in range(3):
        clock.seconds += 0.9 * TIMEOUT
        transfer.moves += 1
        engine.progress()
    for _ in range(4):
        assert not handle.poll()
        clock.seconds += 0.6 * TIMEOUT
        engine.progress()
        if handle.poll():
            break
    with pytest.raises(WaitTimeoutError, match=r"was not done in 1.\.. s after its last progress"):
        handle.wait()


def test_a_wait_without_any_progress_fails_at_its_deadline(clock):
    """It raises in the first round after the timeout."""
    engine, handle = begun(Transfer(pieces=1))
    clock.seconds += 0.99 * TIMEOUT
    engine.progress()
    assert not handle.poll()
    clock.seconds += 0.02 * TIMEOUT
    engine.progress()
    with pytest.raises(WaitTimeoutError, match=r"was not done in 10\.1 s \(ASYNCDDP_TIMEOUT=10\)"):
        handle.wait()


def test_each_step_of_an_operation_is_progress():
    """A round in which an operation went on to its next condition tells so, others do not."""
    conditions = [Transfer(pieces=1) for _ in range(3)]
    for condition in conditions:
        condition.missing = list

    def steps(operation):
        yield from conditions

    engine = ProgressEngine(LoopbackTransport.group(1)[0], Config())
    handle = engine.submit(OperationSpec("steps", steps))
    for condition in conditions:
        assert not engine.progress()
        condition.moves = 1
        assert engine.progress()
    assert handle.poll()


def test_each_piece_of_a_device_tensor_is_progress(monkeypatch):
    """Rounds in which pieces entered another stage are as many as told so, though none ended."""
    monkeypatch.setattr(staged_transport, "_PIECE", 64)
    streams, tensor = SimulatedStreams(laziness=3), torch.ones(16 * 10)
    staged = CudaStagedTransport(LoopbackTransport.group(1)[0], streams)
    request = staged.iallreduce(tensor)
    engine, handle = begun(request, StreamOrdering(streams, ()))
    rounds, work = [], handle._work
    while not work.finished:
        before = request.moves
        moved = engine.progress()
        rounds.append((moved, request.moves != before or work.finished))
    assert request.moves == 3 * 10
    assert all(moved == changed for moved, changed in rounds)
    assert {True, False} == {moved for moved, _ in rounds}


def ordered(engine, name, transfer, **traits):
    """The handle of a collective of one rank that waits for a transfer, and says once it starts."""
    started = []

    def steps(operation):
        yield from operation.collective([0], FORM, lambda: started.append(name) or transfer)
        return name

    spec = OperationSpec("slow", steps, name, ordered=True, **traits)
    return engine.submit(spec), started


def test_a_collective_that_overlaps_lets_the_next_one_start_and_end_before_it():
    """The next starts once this one has started, in the order of the calls, and no earlier."""
    engine = ProgressEngine(LoopbackTransport.group(1)[0], Config())
    transfers = [Transfer(pieces=1) for _ in range(3)]
    calls = [
        ordered(engine, f"call {number}", one, overlaps=number != 1)
        for number, one in enumerate(transfers)
    ]
    assert [started for _, started in calls] == [["call 0"], ["call 1"], []]
    transfers[1].moves = 1
    engine.progress()
    assert [handle.poll() for handle, _ in calls] == [False, True, False]
    engine.progress()
    assert calls[2][1] == ["call 2"]
    transfers[2].moves = transfers[0].moves = 1
    assert [handle.wait() for handle, _ in calls] == ["call 0", "call 1", "call 2"]


def test_only_so_many_collectives_of_a_sequence_overlap():
    """What comes beyond them waits until one has ended."""
    engine = ProgressEngine(LoopbackTransport.group(1)[0], Config())
    transfers = [Transfer(pieces=1) for _ in range(20)]
    calls = [ordered(engine, "call", one, overlaps=True) for one in transfers]
    most = sum(bool(started) for _, started in calls)
    assert 1 < most < len(calls)
    transfers[3].moves = 1
    engine.progress()
    assert sum(bool(started) for _, started in calls) == most + 1
    for one in transfers:
        one.moves = 1
    assert [handle.wait() for handle, _ in calls] == ["call"] * len(calls)
