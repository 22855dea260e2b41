"""Messages by NCCL that cannot go: both ranks are told why, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from asyncddp.device.stream_interfaces import HostStreams
from asyncddp.errors import MismatchError, PeerError
from asyncddp.transport.cuda.nccl import communicator
from asyncddp.transport.cuda.nccl.communicator import communicator_budget, run_in_threads
from asyncddp.transport.cuda.nccl.cupy_bindings import CHANNELS
from asyncddp.transport.cuda.nccl.point_to_point import NCCLPointToPoint
from asyncddp.transport.loopback import LoopbackTransport
from tests.support.late_device import LateDevice
from tests.support.nccl import FakeNccl, NcclError

SECONDS = 60.0


class Two:
    """Both sides of a pair, driven by one thread; side 0 leads."""

    def __init__(self, rooms=(1, 1)):
        self.nccl, self.notes = FakeNccl(LateDevice()), LoopbackTransport.group(2)
        self.bases = LoopbackTransport.group(2)
        self.sides = [
            NCCLPointToPoint(
                rank,
                self.nccl.device,
                self.nccl.library(rank),
                self.notes[rank],
                threading.Semaphore(rooms[rank]),
                self._stage(rank),
            )
            for rank in (0, 1)
        ]

    def _stage(self, rank):
        base = self.bases[rank]
        return lambda data, peer, tag, sends: (base.isend if sends else base.irecv)(data, peer, tag)

    def send(self, rank, tensor, tag=0):
        return self.sides[rank].begin(tensor, 1 - rank, tag, sends=True)

    def receive(self, rank, out, tag=0):
        return self.sides[rank].begin(out, 1 - rank, tag, sends=False)

    def until(self, holds, *drivers):
        """Let both sides, or the given ones, go on until something holds."""
        deadline = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < deadline
            for rank in drivers or (0, 1):
                self.sides[rank].drive()

    def open(self):
        """Send something each way."""
        one, two = torch.zeros(2), torch.zeros(2)
        for transfer in [
            *(self.receive(0, one), self.receive(1, two)),
            *(self.send(0, torch.ones(2)), self.send(1, torch.ones(2))),
        ]:
            self.until(transfer.done)
        self.settle()
        assert one.tolist() == two.tolist() == [1.0, 1.0]
        return self

    def settle(self):
        """Let both sides go on until the device has ended all messages."""
        self.until(lambda: not any([side.watch(SECONDS) for side in self.sides]))

    @property
    def comms(self):
        return [module.made[0] for module in self.nccl.modules.values()]

    def close(self):
        for side in self.sides:
            side.close()
        return [comm.ended for comm in self.comms]


def told(transfer):
    """What makes a transfer fail."""
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            transfer.done()
    except PeerError as problem:
        return str(problem)
    raise AssertionError("it did not fail")


@pytest.mark.parametrize("sender", [0, 1])
def test_sizes_that_differ_are_told_on_both_sides_and_the_next_message_goes(sender):
    """Unequal sizes raise one MismatchError on both ranks; the next message of the tag goes."""
    two, out = Two().open(), torch.zeros(3)
    sending = two.send(sender, torch.ones(2), 7)
    arriving = two.receive(1 - sender, out, 7)
    two.until(lambda: False not in {t.problem is not None for t in (sending, arriving)})
    words = (
        f"rank {sender} sent 8 bytes to rank {1 - sender} with tag 7, which expected 12: send and "
        "receive tensors of one size"
    )
    assert told(sending) == told(arriving) == words
    assert isinstance(sending.problem, MismatchError)
    again = two.send(sender, torch.ones(3), 7), two.receive(1 - sender, out, 7)
    two.until(lambda: all([transfer.done() for transfer in again]))
    two.settle()
    assert out.tolist() == [1.0] * 3
    assert two.close() == ["destroy", "destroy"]


@pytest.mark.parametrize("receiver", [0, 1])
def test_a_receive_that_was_given_up_in_time_takes_nothing(receiver):
    """A receive abandoned before its match takes nothing; the next one gets the message."""
    two, forgotten, out = Two().open(), torch.zeros(3), torch.zeros(3)
    two.receive(receiver, forgotten).abandon()
    for _ in range(100):
        two.sides[0].drive()
        two.sides[1].drive()
    sending, arriving = two.send(1 - receiver, torch.ones(3)), two.receive(receiver, out)
    two.until(lambda: all([sending.done(), arriving.done()]))
    two.settle()
    assert (forgotten.tolist(), out.tolist()) == ([0.0] * 3, [1.0] * 3)
    assert two.close() == ["destroy", "destroy"]


def test_a_receive_that_is_given_up_when_its_sender_has_begun_is_dropped():
    """The leader has entered its send; the follower's tensor stays as it is all the same."""
    two, forgotten, out = Two().open(), torch.zeros(3), torch.zeros(3)
    arriving, sending = two.receive(1, forgotten), two.send(0, torch.ones(3))
    two.until(lambda: sending.launched, 0)
    arriving.abandon()
    arriving.abandon()
    following = two.send(0, torch.full((3,), 2.0)), two.receive(1, out)
    two.until(lambda: all([transfer.done() for transfer in following]))
    two.settle()
    assert (forgotten.tolist(), out.tolist()) == ([0.0] * 3, [2.0] * 3)
    assert two.close() == ["destroy", "destroy"]


@pytest.mark.parametrize("sender", [0, 1])
def test_a_send_that_was_given_up_goes_all_the_same(sender):
    """An abandoned send is still received."""
    two, out = Two().open(), torch.zeros(3)
    two.send(sender, torch.ones(3)).abandon()
    arriving = two.receive(1 - sender, out)
    two.until(arriving.done)
    two.settle()
    assert out.tolist() == [1.0] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_messages_that_the_device_does_not_end_break_the_pair_with_words(rank, monkeypatch):
    """Launched messages are complete; at the deadline both abort, and later messages raise."""
    two = Two().open()
    monkeypatch.setattr(two.nccl.device, "step", lambda: None)
    sending, arriving = two.send(0, torch.ones(3)), two.receive(1, torch.ones(3))
    two.until(lambda: all([sending.done(), arriving.done()]))
    waiting = two.receive(1 - rank, torch.zeros(3), 9)
    two.until(lambda: two.sides[rank].watch(0.05) is False, rank)
    words = (
        f"by NCCL cannot go on: rank {rank}: a group of 1 messages, which all its ranks had "
        "posted, has not ended in 0.05 s. End and restart the run, or leave nccl out of "
        "ASYNCDDP_DEVICE_TRANSPORTS."
    )
    assert f"messages between rank {1 - rank} and rank {rank} {words}" == told(waiting)
    for side in (0, 1):
        with pytest.raises(PeerError, match=r"has not ended in 0\.05 s"):
            two.send(side, torch.ones(1))
    assert two.close() == ["abort", "abort"]


def test_pieces_that_end_count_as_progress(monkeypatch):
    """The deadline is that of the oldest group, counted from the end of the one before it."""
    two, now = Two().open(), [0.0]
    monkeypatch.setattr(communicator.time, "monotonic", lambda: now[0])
    for number in range(3):
        sending, arriving = (
            two.send(0, torch.ones(3), number),
            two.receive(1, torch.ones(3), number),
        )
        while not (sending.done() and arriving.done()):
            now[0] += 1e-3
    events = two.sides[0]._pairs[1]._communicator._watched
    while events:
        now[0] += 0.9
        left = len(events)
        while len(events) == left:
            two.sides[0].watch(1.0)
        assert two.comms[0].ended is None


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_that_nccl_reports_later_is_told_on_both_sides(rank, monkeypatch):
    """An asynchronous error aborts both communicators and fails all transfers of the pair."""
    two = Two().open()
    monkeypatch.setattr(two.nccl.device, "step", lambda: None)
    waiting = [two.receive(side, torch.zeros(3), 9) for side in (0, 1)]
    sending, arriving = two.send(rank, torch.ones(3)), two.receive(1 - rank, torch.ones(3))
    two.until(lambda: arriving.launched and sending.launched)
    two.comms[rank].problem = "NCCL_ERROR_SYSTEM_ERROR: unhandled system error"
    assert not two.sides[rank].watch(SECONDS)
    for transfer in waiting:
        assert f"rank {rank}: NCCL reports: NCCL_ERROR_SYSTEM_ERROR" in told(transfer)
    assert [comm.ended for comm in two.comms] == ["abort", "abort"]


def test_a_call_that_nccl_refuses_is_told_on_both_sides():
    """A launch that fails on one rank fails the transfer on both, and aborts the pair."""
    two = Two().open()

    def refuse(*_):
        raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: invalid argument")

    two.comms[0].send = refuse
    arriving, sending = two.receive(1, torch.zeros(3)), two.send(0, torch.ones(3))
    two.until(lambda: sending.problem is not None and arriving.problem is not None)
    for transfer in (sending, arriving):
        assert "rank 0: messages could not be started: NCCL_ERROR_INVALID_ARG" in told(transfer)
    assert two.close() == ["abort", "abort"]


def test_a_communicator_that_nccl_does_not_open_is_told_on_both_sides():
    """A communicator that does not open fails both transfers with its reason and advice."""
    two = Two()

    def refuse(*_):
        raise NcclError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")

    for module in two.nccl.modules.values():
        module.NcclCommunicator = refuse
    arriving, sending = two.receive(1, torch.zeros(3)), two.send(0, torch.ones(3))
    two.until(lambda: sending.problem is not None and arriving.problem is not None)
    assert "NCCL opens no communicator of the two (NCCL_ERROR_SYSTEM_ERROR" in told(sending)
    assert "End and restart the run, or leave nccl out of ASYNCDDP_DEVICE_TRANSPORTS" in told(
        arriving
    )


@pytest.mark.parametrize("rooms", [(0, 1), (1, 0), (0, 0)])
def test_a_pair_without_room_on_one_side_is_staged_in_order(rooms):
    """A pair stages, in order, where either side's budget is spent, and keeps no budget."""
    two, outs = Two(rooms), [torch.zeros(1) for _ in range(4)]
    two.receive(1, torch.zeros(1), 9).abandon()
    sends = [two.send(0, torch.full((1,), k)) for k in (0.0, 1.0)]
    receives = [two.receive(1, out) for out in outs[:3]]
    two.until(lambda: all([transfer.done() for transfer in (*sends, *receives[:2])]))
    sends = [two.send(0, torch.full((1,), k)) for k in (2.0, 3.0)]
    receives.append(two.receive(1, outs[3]))
    two.until(lambda: all([transfer.done() for transfer in (*sends, *receives)]))
    assert torch.cat(outs).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [module.made for module in two.nccl.modules.values()] == [[], []]
    assert two.sides[1].budget.acquire(blocking=False) is (rooms[1] == 1), (
        "what was not used was given back"
    )


def test_closing_aborts_what_is_under_way(monkeypatch):
    """Closing a pair with transfers on the device aborts both communicators, once."""
    two = Two().open()
    monkeypatch.setattr(two.nccl.device, "step", lambda: None)
    sending, arriving = two.send(0, torch.ones(3)), two.receive(1, torch.ones(3))
    two.until(lambda: arriving.launched and sending.launched)
    assert two.close() == ["abort", "abort"]
    assert two.close() == ["abort", "abort"]


def test_closing_does_not_wait_for_a_peer_that_never_opens():
    """Closing does not wait for an opening communicator, which is aborted once it is open."""
    two = Two()
    arriving = two.receive(1, torch.zeros(3))
    two.until(lambda: two.nccl._identities, 0)  # the leader has begun to open
    begun = time.monotonic()
    two.sides[0].close()
    assert time.monotonic() - begun < SECONDS / 2
    two.until(lambda: two.nccl.modules[0].made and two.nccl.modules[1].made, 1)
    two.sides[1].close()
    deadline = time.monotonic() + SECONDS
    while any(comm.ended != "abort" for comm in two.comms):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not arriving.launched


def test_what_takes_too_long_is_left_to_its_thread():
    """``run_in_threads`` returns at its timeout and leaves calls that still run."""
    forever = threading.Event()
    begun = time.monotonic()
    run_in_threads([forever.wait, forever.wait, lambda: None], HostStreams(), timeout=0.1)
    assert 0.1 <= time.monotonic() - begun < SECONDS / 2
    forever.set()


@pytest.mark.parametrize(
    ("processors", "channels", "expected"),
    [(132, None, 8), (132, "16", 4), (132, "many", 8), (20, None, 1), (4, None, 1)],  # of 32 queues
)
def test_pairs_take_half_of_a_gpu_at_most(processors, channels, expected, monkeypatch):
    """Pairs' channels take at most half of a GPU, but one communicator may always open."""
    monkeypatch.delenv("NCCL_MAX_P2P_NCHANNELS", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if channels is not None:
        monkeypatch.setenv("NCCL_MAX_P2P_NCHANNELS", channels)
    facts = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    room, taken = communicator_budget(torch.device("cuda", 0)), 0
    while room.acquire(blocking=False):
        taken += 1
    assert taken == expected
    assert taken == 1 or taken * int(channels if channels == "16" else CHANNELS) <= processors / 2


@pytest.mark.parametrize(("queues", "expected"), [(None, 2), ("8", 2), ("1", 0), ("14", 8)])
def test_pairs_take_no_more_streams_than_there_are_hardware_queues(
    queues, expected, monkeypatch, caplog
):
    """With fewer queues than pairs would take a warning says how to get more."""
    monkeypatch.delenv("NCCL_MAX_P2P_NCHANNELS", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    facts = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert communicator_budget(torch.device("cuda", 0))._value == expected
    told = (
        f"CUDA_DEVICE_MAX_CONNECTIONS is {queues or 8}, so messages go by NCCL to {expected} peers"
    )
    assert (told in caplog.text) == (expected < 8)


class Nameless:
    """cupy's communicator where NCCL gives a result for which cupy has no name."""

    def __init__(self):
        self.aborted = 0

    def check_async_error(self):
        raise KeyError(7)

    def abort(self):
        self.aborted += 1


def test_a_result_of_nccl_without_a_name_breaks_the_communicator():
    """cupy raises KeyError for ncclInProgress and ncclTimeout, as RuntimeError for the others."""
    streams, handle = HostStreams(), Nameless()
    made = communicator.NCCLCommunicator(streams, contextlib.nullcontext, handle)
    assert made.failed() == "NCCL reports: 7"
    made = communicator.NCCLCommunicator(streams, contextlib.nullcontext, handle)

    def call(given, stream):
        raise KeyError(8)

    with pytest.raises(PeerError, match="a sum could not be started: 8"):
        made.enter("a sum", call, [], [])
    assert handle.aborted == 2
