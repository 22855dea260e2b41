"""Verbs keep to the order of the caller's stream, and nobody waits for the device."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch

import asyncddp as bf
import topology
from asyncddp.engine.mailbox import Mailbox
from asyncddp.engine.messages import Key
from asyncddp.engine.operation import _in_order
from asyncddp.engine.posting import Form, Posting
from asyncddp.errors import MismatchError
from asyncddp.memory.streams import Order, Queue, order_of, stand_in, streams_of
from asyncddp.memory.streams_cuda import CudaStreams
from asyncddp.memory.streams_host import HostStreams
from asyncddp.ops.device_combine import combine_on_device
from asyncddp.ops.mixing import Mixing
from asyncddp.transport.loopback import Loopback
from tests.support.staged import on_a_stand_in

# verbs over a stand-in that is late


def verbs():
    return {
        "neighbor_allreduce": bf.neighbor_allreduce,
        "allreduce": bf.allreduce,
        "broadcast": lambda x: bf.broadcast(x, 0),
        "reduce_scatter": bf.reduce_scatter,
        "allgather": bf.allgather,
        "neighbor_allgather": bf.neighbor_allgather,
        "pair_gossip": lambda x: bf.pair_gossip(x, 1 - bf.rank()),
        "hierarchical": bf.hierarchical_neighbor_allreduce,
    }


@pytest.mark.parametrize("name", verbs())
def test_a_verb_comes_after_what_its_caller_has_queued(name):
    """What the caller still has to compute is what is averaged, on whatever thread it is read."""

    def case(streams):
        bf.set_topology(topology.ring(2))
        bf.set_machine_topology(topology.ring(2))
        value = torch.full((300,), bf.rank() + 1.0)
        known = verbs()[name](value)
        late = torch.full((300,), float("nan"))
        streams.copy(late, value, Queue.CALLER)
        return torch.equal(verbs()[name](late), known)

    settings = {"timeout": 20.0, "ranks_per_machine": 1}
    with on_a_stand_in(laziness=50) as streams, bf.local_world(2, **settings) as world:
        assert world.run(case, streams) == [True, True]


def test_a_stand_in_is_late():
    """Else the tests above would show nothing."""
    with on_a_stand_in(laziness=50) as streams:
        late = torch.full((3,), float("nan"))
        streams.copy(late, torch.ones(3), Queue.CALLER)
        assert late.isnan().all()
        streams.after(Queue.WORK, streams.mark(Queue.CALLER))
        assert late.tolist() == [1.0] * 3


def test_host_tensors_have_no_order_and_pay_nothing():
    x = torch.zeros(2)
    assert streams_of(x) is None
    assert order_of(x, x) is None
    with bf.local_world(2) as world:
        assert world.run(lambda: bf.neighbor_allreduce_nonblocking(x)._operation.program.order) == [
            None,
            None,
        ]


# the order of one verb


class Noted(HostStreams):
    """A stand-in that notes what it is asked."""

    def __init__(self):
        super().__init__()
        self.log = []

    def mark(self, queue):
        self.log.append(("mark", queue))
        return super().mark(queue)

    def after(self, queue, event):
        self.log.append(("after", queue, event.queue))
        super().after(queue, event)

    @contextmanager
    def working(self, queue):
        self.log.append(("enter", queue))
        yield
        self.log.append(("leave", queue))

    def hold(self, tensor, queue):
        self.log.append(("hold", queue))


BEGIN = [
    ("mark", Queue.CALLER),
    ("after", Queue.WORK, Queue.CALLER),
    ("after", Queue.OUT, Queue.CALLER),
    ("after", Queue.IN, Queue.CALLER),
    ("hold", Queue.WORK),
    ("hold", Queue.OUT),
]
STEP = [("enter", Queue.WORK), ("leave", Queue.WORK)]


def test_each_step_of_a_verb_is_work_between_two_events():
    """From the event on the caller's queue at the call to the one that the caller waits for."""
    streams = Noted()
    order = Order(streams, (torch.zeros(1),))

    def steps():
        yield "first"
        return "result"

    running = _in_order(order, steps())
    assert next(running) == "first"
    assert streams.log == BEGIN + STEP
    with pytest.raises(StopIteration) as stop:
        next(running)
    assert stop.value.value == "result"
    assert streams.log == [*BEGIN, *STEP, *STEP, ("mark", Queue.WORK)]
    order.arrive(torch.zeros(1))
    assert streams.log[-2:] == [("after", Queue.CALLER, Queue.WORK), ("hold", Queue.CALLER)]


def test_a_verb_that_fails_is_waited_for_as_well():
    streams = Noted()
    order, closed = Order(streams, ()), []

    def steps():
        try:
            yield "first"
        finally:
            closed.append(True)

    running = _in_order(order, steps())
    next(running)
    running.close()
    assert closed == [True]
    order.arrive(None)
    assert streams.log[-1] == ("after", Queue.CALLER, Queue.WORK)


def test_a_verb_that_never_began_is_not_waited_for():
    streams = Noted()
    order = Order(streams, ())
    order.arrive(None)
    assert streams.log == [("mark", Queue.CALLER)]


def test_tensors_on_other_devices_are_not_held():
    streams = Noted()
    with stand_in(streams):
        order = order_of(torch.zeros(1), None, torch.zeros(1, device="meta"), torch.zeros(2))
    order.begin()
    assert streams.log.count(("hold", Queue.WORK)) == 2


# CUDA's


class FakeStream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    cuda_stream = 4711

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.place))


class FakeEvent:
    def __init__(self, log):
        self.log, self.place = log, None

    def record(self, stream):
        self.place = stream.name
        self.log.append(("record on", stream.name))

    def query(self):
        self.log.append(("asked", self.place))
        return False


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda with streams and events that note their use; whatever else is asked fails."""
    log, names = [], iter(["work", "out", "in", "group"])
    current = FakeStream(log, "current")

    def entered(stream):
        log.append(("entered", stream.name))
        return nullcontext()

    def refused(*_):
        raise AssertionError("somebody waits for the device")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(log, next(names)))
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "synchronize", refused)
    return log


def test_cuda_s_queues_are_streams_that_wait_for_events(cuda):
    streams = CudaStreams(torch.device("cuda", 0))
    begun = streams.mark(Queue.CALLER)
    streams.after(Queue.WORK, begun)
    with streams.working(Queue.WORK):
        ended = streams.mark(Queue.WORK)
    streams.after(Queue.CALLER, ended)
    assert not ended.done()
    assert cuda == [
        ("record on", "current"),
        ("work", "waits for", "current"),
        ("entered", "work"),
        ("record on", "work"),
        ("current", "waits for", "work"),
        ("asked", "work"),
    ]


def test_cuda_s_copies_do_not_block(cuda):
    class Tensor:
        is_cuda = True

        def copy_(self, source, *, non_blocking=False):
            cuda.append(("copied", source, non_blocking))

        def record_stream(self, stream):
            cuda.append(("held for", stream.name))

    streams, out = CudaStreams(torch.device("cuda", 0)), Tensor()
    streams.copy(out, "source", Queue.IN)
    streams.hold(out, Queue.IN)
    assert cuda == [("entered", "in"), ("copied", "source", True), ("held for", "in")]
    assert streams.pointer(Queue.GROUP) == 4711
    streams.hold(torch.zeros(1), Queue.IN)
    assert len(cuda) == 3, "memory of the host has no stream"


class Storage:
    """Of a tensor on a GPU, as far as showing it to another process goes."""

    def __init__(self, log):
        self.log = log

    def data_ptr(self):
        return 4711

    def nbytes(self):
        return 12

    def _share_cuda_(self):
        self.log.append("shown")
        return 5, b"handle", 12, 0, b"counter", 3, b"event", True


def test_cuda_s_memory_is_shown_to_other_processes_as_torch_shows_it(cuda, monkeypatch):
    """The reader opens it on its own GPU, whatever number it has where it lies."""
    streams, opened = CudaStreams(torch.device("cuda", 0)), []

    class Tensor:
        def untyped_storage(self):
            return Storage(cuda)

        def set_(self, storage):
            return "all bytes of", storage

    def found(*arguments):
        opened.append(arguments)
        return "storage"

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", found)
    monkeypatch.setattr(torch, "empty", lambda *_, **options: Tensor())
    token = streams.lend(Tensor())
    assert streams.borrow(token) == ("all bytes of", "storage")
    assert opened == [(0, b"handle", 12, 0, b"counter", 3, b"event", True)]
    assert cuda == [("entered", "in"), "shown", ("entered", "in")], "its own event holds nobody up"


def test_what_a_user_holds_is_shown_by_an_alias(cuda, monkeypatch):
    """Else record_stream would pass over it from then on."""
    seen = []

    class Tensor:
        def untyped_storage(self):
            return Storage(cuda)

    def as_tensor(source, *, device):
        seen.append((source.__cuda_array_interface__, device))
        return "alias"

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    streams = CudaStreams(torch.device("cuda", 1))
    assert streams.alias(Tensor()) == "alias"
    ((described, device),) = seen
    assert device == streams.device
    assert (described["data"], described["shape"], described["typestr"]) == (
        (4711, False),
        (12,),
        "|u1",
    )


def test_cuda_s_events_are_shown_without_being_recorded_first(cuda, monkeypatch):
    """Their handle is taken on their own device, and opened on that of whoever waits."""

    class Shared(FakeEvent):
        def __init__(self, log, interprocess=False):
            super().__init__(log)
            assert interprocess

        def ipc_handle(self):
            self.log.append("handle")
            return b"handle"

        @staticmethod
        def from_ipc_handle(device, handle):
            event = FakeEvent(cuda)
            event.place = device, handle
            return event

    def entered(device):
        cuda.append(("on", device))
        return nullcontext()

    create = Shared
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "Event", lambda **flags: create(cuda, **flags))
    torch.cuda.Event.from_ipc_handle = Shared.from_ipc_handle
    streams = CudaStreams(torch.device("cuda", 0))
    event = streams.interprocess_event()
    assert event.handle == b"handle"
    event.record(Queue.WORK)
    streams.after(Queue.WORK, streams.imported_event(event.handle))
    where = torch.device("cuda", 0)
    assert cuda == [
        ("on", where),
        "handle",
        ("record on", "work"),
        ("work", "waits for", (where, b"handle")),
    ]


# mixed ranks


def test_ranks_on_different_devices_are_told_at_both_ends():
    """The message names the name, both ranks, what was expected and what came."""
    ends = Loopback.group(2)
    mailboxes = [Mailbox(end) for end in ends]
    key = Key("w", 0)
    on_host = Posting(key, Form("verb", "float32", (9,)), [1], [1])
    there = Posting(key, Form("verb", "float32", (9,), "cuda"), [0], [0])
    there.streams = HostStreams()
    mailboxes[0].open(on_host, check=False)
    mailboxes[1].open(there, check=False)
    mailboxes[0].send(on_host, 1, torch.ones(9))
    mailboxes[1].send(there, 0, torch.ones(9))
    for _ in range(3):
        for mailbox, end in zip(mailboxes, ends, strict=True):
            mailbox.flush()
            for peer, bundle in end.poll():
                mailbox.receive(peer, bundle)
    with pytest.raises(MismatchError) as caught:
        on_host.raise_if_failed()
    assert str(caught.value) == (
        "rank 0, verb 'w' (use 0), peer rank 1: expected a tensor on cpu, got one on cuda"
    )
    with pytest.raises(MismatchError, match="expected a tensor on cuda, got one on cpu"):
        there.raise_if_failed()
    mailboxes[0].close(on_host, on_host.error)
    assert there.departures[0].done(), "what nobody wants is taken, so that its sender goes on"


# mixing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [(0.25, 0.75), (0.25, 0.25), (1 / 3, 1 / 3), (0.5, 0.5)])
def test_halves_are_mixed_in_float32_and_rounded_once(dtype, weights):
    """The result is the exact sum, rounded, but for ties: at most one unit in the last place."""
    generator = torch.Generator().manual_seed(1)
    number = 1 if sum(weights) == 1.0 else 2
    own, *others = (torch.randn(999, generator=generator).to(dtype) for _ in range(1 + number))
    mixing = Mixing(weights[0], dict.fromkeys(range(1, 1 + number), weights[1]), {})
    out = torch.empty_like(own)
    combine_on_device(mixing, torch.float32, own, others, out)
    exact = own.double() * weights[0] + sum(other.double() * weights[1] for other in others)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=0.51 * unit, atol=1e-6)


def test_the_average_of_integers_is_rounded_half_to_even():
    mixing = Mixing(0.5, {1: 0.5}, {})
    own, other = torch.tensor([0, 2, 4, -2]), torch.tensor([1, 3, 5, -1])
    combine_on_device(mixing, torch.float64, own, [other], own)
    assert own.tolist() == [0, 2, 4, -2]
