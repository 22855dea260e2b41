"""``cuda_ipc``: the protocol between processes, over memory of the host that both have mapped."""

from __future__ import annotations

import random

import pytest
import torch

from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.transport.cuda.ipc import exporter as cuda_ipc_sending
from asyncddp.transport.cuda.ipc.ipc_messages import DoneMessage, ReadyMessage, decode_message
from asyncddp.transport.cuda.ipc.ipc_transport import CudaIPCTransport
from tests.conformance import test_transports as transports
from tests.support import on
from tests.support.ipc import NEVER, Pair, all_done
from tests.support.simulated_streams import SimulatedStreams


def over_ipc(base, case, *args):
    near = [rank for rank in range(base.size) if rank != base.rank]
    transport = CudaIPCTransport.open(base, SimulatedStreams(1, pace=1e-4), near, 60.0)
    return getattr(transports, case)(transport, *args)


CASES = {
    "by_tag_backwards": (),
    "same_tag_in_order": (),
    "every_dtype_in_bulk": (),
    "around_pieces": ([0, 1, 999, 1000, 1001, 2000, 30_001],),
    "given_up_receive": (),
    "given_up_send": (),
    "several_at_once": (),
    "splits": (),
    "closes_twice": (),
}


@on("mpi-2")
@pytest.mark.parametrize("case", CASES)
def test_the_contract_of_transports_between_processes(world, case):
    """``cuda_ipc`` between two processes keeps the contract of transports."""
    told = world.run_bare(over_ipc, case, *CASES[case])
    if case == "given_up_receive":
        assert told[0] == ([0.0] * 3, [1.0] * 3)


@pytest.fixture
def small(monkeypatch):
    """What is large elsewhere has a few hundred bytes."""
    monkeypatch.setattr(cuda_ipc_sending, "MAX_COPY_BYTES", 1 << 12)
    monkeypatch.setattr(cuda_ipc_sending, "_PIECE", 1 << 10)


# nobody asks the device


def test_nobody_waits_for_a_device_between_a_tensor_and_the_sum_with_it():
    """Neither device does anything here, and still all is queued at both ends."""
    both = Pair(laziness=NEVER)
    one, other = both.transports
    data, mixed = torch.arange(300.0), torch.zeros(300)
    exported = one.export_tensor(data, {1: 0})[1]
    assert exported.reusable(), "what the verb does next comes after the copy"
    assert not exported.done(), "the peer has not answered"
    imported = other.import_tensor((300,), torch.float32, 0, 0)
    assert imported.done()
    other.streams.copy(mixed, imported.tensor, StreamRole.COMPUTE)
    imported.release()
    assert exported.done()
    assert [device.questions for device in both.devices] == [0, 0]
    assert not mixed.any(), "nothing was copied so far"
    while both.work():
        pass
    assert torch.equal(mixed, data)


def test_a_tensor_is_copied_each_time_into_buffers_that_are_opened_once():
    """What peers map is memory of the transport alone, however often a tensor is sent."""
    both = Pair()
    one, other = both.transports
    data, shown = torch.randn(1000), set()
    export = one.streams.export_memory
    one.streams.export_memory = lambda memory: shown.add(memory.data_ptr()) or export(memory)
    for step in range(4):
        data.add_(1.0)
        exported = one.export_tensor(data, {1: step})[1]
        assert exported.reusable(), "what is queued next comes after the copy"
        assert torch.equal(both.receive(data, step), data)
        both.finish(exported)
    assert one.streams.copied == 4 * data.nbytes
    assert len(shown) == len(other._importer.imported) == one.memory.buffers.num_allocated == 1
    assert data.data_ptr() not in shown


# messages


@pytest.fixture
def posted(monkeypatch):
    """Two ranks, and every message that they post, with its length in bytes."""
    both, messages = Pair(), []
    for rank, transport in enumerate(both.transports):

        def noted(peer, data, rank=rank, post=transport._message_transport.post):
            messages.append((decode_message(data, rank), len(data)))
            post(peer, data)

        monkeypatch.setattr(transport._message_transport, "post", noted)
    return both, messages


def test_tokens_and_handles_are_sent_once(posted):
    """The first message about memory or an event has what opens it; later ones are numbers."""
    both, messages = posted
    for tag in range(3):
        data = torch.randn(1000)
        assert torch.equal(both.exchange(data, 32_000 + tag), data)
    ready = [message for message, _ in messages if isinstance(message, ReadyMessage)]
    done = [message for message, _ in messages if isinstance(message, DoneMessage)]
    assert len(ready) == len(done) == 3
    assert {(message.event_pair, message.memory_id) for message in ready} == {(0, 0)}
    for message, *later in ([one.token for one in ready], [one.ready for one in ready]):
        assert message
        assert later == [b""] * 2
    assert [bool(message.read) for message in done] == [True, False, False]
    assert max(length for _, length in messages[2:]) <= 16


def test_each_peer_is_sent_a_token_of_its_own():
    """A buffer that several peers read is exported once to each of them."""
    three, shown = Pair(near=(0, 1, 2), size=3), []
    export = three.devices[0].export_memory
    three.devices[0].export_memory = lambda memory: shown.append(memory) or export(memory)
    for tag in range(3):
        data = torch.randn(500)
        exported = three.transports[0].export_tensor(data, {1: tag, 2: tag})
        assert all(torch.equal(three.receive(data, tag, rank), data) for rank in (1, 2))
        three.finish(*exported.values())
    assert len(shown) == 2
    assert three.transports[0].memory.buffers.num_allocated == 1


def test_tensors_taken_in_another_order_than_they_were_sent_are_opened_by_their_own_tokens(posted):
    """Each message has the token and handle that it needs, whatever is taken before it."""
    both, messages = posted
    data = [torch.randn(100) for _ in range(4)]
    exported = [both.transports[0].export_tensor(one, {1: tag})[1] for tag, one in enumerate(data)]
    for tag in (2, 0, 3, 1):
        assert torch.equal(both.receive(data[tag], tag), data[tag])
    both.finish(*exported)
    ready = [message for message, _ in messages if isinstance(message, ReadyMessage)]
    assert all(message.token and message.ready for message in ready)
    assert len({message.memory_id for message in ready}) == len(ready) == 4


def test_a_message_that_comes_late_holds_up_nothing_else():
    """While a receive waits for its message, tensors go both ways; it gets what comes then."""
    both, out, data = Pair(), torch.zeros(50), torch.randn(50)
    late = both.transports[1].irecv(out, 0, 7)
    assert torch.equal(both.exchange(data, 8), data)
    back = torch.empty_like(data)
    arriving = both.transports[0].irecv(back, 1, 9)
    both.finish(both.transports[1].isend(data * 2.0, 0, 9), arriving)
    assert torch.equal(back, data * 2.0)
    assert not late.done()
    both.finish(both.transports[0].isend(data * 3.0, 1, 7), late)
    assert torch.equal(out, data * 3.0)
    assert not both.transports[1]._importer._unread


# order


def test_the_tensor_is_copied_after_the_work_that_makes_it():
    """A tensor is copied after what was queued on the compute stream before the send."""
    both, late = Pair(laziness=20), torch.zeros(10)
    both.devices[0].copy(late, torch.ones(10), StreamRole.COMPUTE)
    assert both.exchange(late).tolist() == [1.0] * 10


def test_a_buffer_is_written_again_only_after_what_reads_it(small):
    """The answer has come, and the reading is still queued on the peer's device."""
    both = Pair(laziness=NEVER)
    one, other = both.transports
    mine, yours = both.devices
    first = torch.zeros(64)
    exported = one.export_tensor(torch.full((64,), 1.0), {1: 0})[1]
    imported = other.import_tensor((64,), torch.float32, 0, 0)
    assert all_done(imported)
    yours.copy(first, imported.tensor, StreamRole.COMPUTE)
    imported.release()
    assert all_done(exported)
    one.export_tensor(torch.full((64,), 2.0), {1: 1})
    assert one.memory.buffers.num_allocated == 1
    while mine._step(StreamRole.COMPUTE):
        pass
    assert mine._queues[StreamRole.COMPUTE], "the second copy waits for the peer"
    while both.work():
        pass
    assert not mine._queues[StreamRole.COMPUTE]
    assert first.tolist() == [1.0] * 64


def test_no_event_is_recorded_again_before_the_other_side_waits_for_it(small, monkeypatch):
    """Neither the sender's before the answer, nor the reader's before the slot comes again."""
    both = Pair()
    one, other = both.transports
    recorded = []
    for streams in both.devices:

        def noted(make=streams.create_interprocess_event):
            event = make()
            record = event.record
            event.record = lambda queue: recorded.append(event) or record(queue)
            return event

        monkeypatch.setattr(streams, "create_interprocess_event", noted)
    exported = [one.export_tensor(torch.randn(64), {1: tag})[1] for tag in range(5)]
    assert len(set(map(id, recorded))) == 5
    imports = [other.import_tensor((64,), torch.float32, 0, tag) for tag in range(5)]
    both.finish(*imports)
    for imported in imports:
        imported.release()
    both.finish(*exported)
    assert len(recorded) == len(set(map(id, recorded))) == 10
    both.exchange(torch.randn(64), 5)
    assert (len(recorded), len(set(map(id, recorded)))) == (12, 10)


def test_peers_share_one_copy_and_each_lets_it_go():
    """Several peers read one exported buffer, which is reused once all have let it go."""
    three = Pair(near=(0, 1, 2), size=3)
    data = torch.randn(500)
    for step in range(3):
        exported = three.transports[0].export_tensor(data, {1: step, 2: step}, factor=0.5)
        assert torch.equal(three.receive(data, step, 1), data * 0.5)
        assert not exported[2].done()
        assert torch.equal(three.receive(data, step, 2), data * 0.5)
        three.finish(*exported.values())
    assert three.transports[0].memory.buffers.num_allocated == 1


def test_what_is_larger_than_a_buffer_comes_in_pieces_through_a_few(small):
    """A tensor larger than a buffer arrives in pieces through a bounded number of them."""
    both = Pair(laziness=2)
    one, other = both.transports
    data, out = torch.randn(2500), torch.empty(2500)
    exported = one.export_tensor(data, {1: 3}, factor=2.0)[1]
    imported = other.import_tensor((2500,), torch.float32, 0, 3)
    both.finish(exported, imported)
    other.streams.copy(out, imported.tensor, StreamRole.COMPUTE)
    while both.work():
        pass
    assert torch.equal(out, data * 2.0)
    assert one.memory.buffers.num_allocated <= cuda_ipc_sending._DEPTH + 1, (
        "the last one has a size of its own"
    )
    assert torch.equal(both.exchange(data, 4), data)


# anything


class Mixer:
    """Reads exported tensors in place, as soon as it can or later."""

    def __init__(self, transport):
        self.transport, self.imports = transport, []

    def begin_import(self, out, tag):
        self.imports.append(
            (self.transport.import_tensor(tuple(out.shape), out.dtype, 0, tag), out)
        )

    def mix(self):
        for imported, out in [pair for pair in self.imports if pair[0].done()]:
            self.transport.streams.copy(out, imported.tensor, StreamRole.COMPUTE)
            imported.release()
        self.imports = [pair for pair in self.imports if not pair[0].over]


def some_tensors(draw, kept, number):
    """Of any dtype and shape, and some of them again and again."""
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    for _ in range(number):
        shape = draw.choice([(), (0,), (7,), (3, 50), (5, 400)])
        fresh = (torch.randn(shape) * 3).to(draw.choice(dtypes))
        yield draw.choice(kept) if draw.random() < 0.4 else fresh


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_sent_in_whatever_order_arrives(seed):
    """Exported and sent, imported and received, of any dtype and size, released at any time."""
    draw = random.Random(seed)
    both = Pair(laziness=draw.choice([0, 1, 5]))
    one, other = both.transports
    torch.manual_seed(seed)
    kept = [torch.randn(draw.choice([100, 300])) for _ in range(3)]
    tensors = list(some_tensors(draw, kept, 40))
    got = [torch.empty_like(data) for data in tensors]
    jobs = [(what, tag) for tag in range(40) for what in ("send", "take")]
    draw.shuffle(jobs)
    mixer, under_way = Mixer(other), []
    for what, tag in jobs:
        direct = draw.random() < 0.3
        if what == "send" and direct:
            under_way.append(one.isend(tensors[tag], 1, tag))
        elif what == "send":
            under_way.append(one.export_tensor(tensors[tag], {1: tag})[1])
        elif direct:
            under_way.append(other.irecv(got[tag], 0, tag))
        else:
            mixer.begin_import(got[tag], tag)
        if draw.random() < 0.3:
            mixer.mix()
    for _ in range(5000):
        mixer.mix()
        both.work()
        if all([transfer.done() for transfer in under_way]) and not mixer.imports:
            break
    while both.work():
        pass
    assert not mixer.imports
    for data, found in zip(tensors, got, strict=True):
        assert torch.equal(found, data)
