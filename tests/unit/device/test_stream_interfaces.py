"""Verbs keep to the order of the caller's stream, and nobody waits for the device."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.device.stream_interfaces import StreamOrdering, StreamRole
from asyncddp.device.stream_registry import stream_ordering_of, streams_of, use_streams_on_cpu
from asyncddp.engine.exchange_request import ExchangeRequest
from asyncddp.engine.message_matching import MessageMatcher
from asyncddp.engine.messages import ExchangeSignature, MatchKey
from asyncddp.engine.work import _in_order
from asyncddp.errors import MismatchError
from asyncddp.kernels.device_weighted_sum import weighted_sum_on_device
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.transport.loopback import LoopbackTransport
from tests.support.simulated_streams import SimulatedStreams
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
        streams.copy(late, value, StreamRole.CALLER)
        return torch.equal(verbs()[name](late), known)

    settings = {"timeout": 20.0, "ranks_per_machine": 1}
    with on_a_stand_in(laziness=50) as streams, bf.local_world(2, **settings) as world:
        assert world.run(case, streams) == [True, True]


def test_a_stand_in_is_late():
    """Else the tests above would show nothing."""
    with on_a_stand_in(laziness=50) as streams:
        late = torch.full((3,), float("nan"))
        streams.copy(late, torch.ones(3), StreamRole.CALLER)
        assert late.isnan().all()
        streams.wait_event(StreamRole.COMPUTE, streams.record_event(StreamRole.CALLER))
        assert late.tolist() == [1.0] * 3


def test_host_tensors_have_no_order_and_pay_nothing():
    """Host tensors have neither streams nor an ordering, also in a verb."""
    x = torch.zeros(2)
    assert streams_of(x) is None
    assert stream_ordering_of(x, x) is None
    with bf.local_world(2) as world:
        assert world.run(
            lambda: bf.neighbor_allreduce_nonblocking(x)._work.spec.stream_ordering
        ) == [
            None,
            None,
        ]


# the order of one verb


class Noted(SimulatedStreams):
    """A stand-in that notes what it is asked."""

    def __init__(self):
        super().__init__()
        self.log = []

    def record_event(self, queue):
        self.log.append(("mark", queue))
        return super().record_event(queue)

    def wait_event(self, queue, event):
        self.log.append(("after", queue, event.role))
        super().wait_event(queue, event)

    @contextmanager
    def stream_context(self, queue):
        self.log.append(("enter", queue))
        yield
        self.log.append(("leave", queue))

    def record_stream(self, tensor, queue):
        self.log.append(("hold", queue))


BEGIN = [
    ("mark", StreamRole.CALLER),
    ("after", StreamRole.COMPUTE, StreamRole.CALLER),
    ("after", StreamRole.DEVICE_TO_HOST, StreamRole.CALLER),
    ("after", StreamRole.HOST_TO_DEVICE, StreamRole.CALLER),
    ("hold", StreamRole.COMPUTE),
    ("hold", StreamRole.DEVICE_TO_HOST),
]
STEP = [("enter", StreamRole.COMPUTE), ("leave", StreamRole.COMPUTE)]


def test_each_step_of_a_verb_is_work_between_two_events():
    """From the event on the caller's queue at the call to the one that the caller waits for."""
    streams = Noted()
    order = StreamOrdering(streams, (torch.zeros(1),))

    def steps():
        yield "first"
        return "result"

    running = _in_order(order, steps())
    assert next(running) == "first"
    assert streams.log == BEGIN + STEP
    with pytest.raises(StopIteration) as stop:
        next(running)
    assert stop.value.value == "result"
    assert streams.log == [*BEGIN, *STEP, *STEP, ("mark", StreamRole.COMPUTE)]
    order.arrive(torch.zeros(1))
    assert streams.log[-2:] == [
        ("after", StreamRole.CALLER, StreamRole.COMPUTE),
        ("hold", StreamRole.CALLER),
    ]


def test_a_verb_that_fails_is_waited_for_as_well():
    """After a verb was closed early its caller's stream still waits for its compute stream."""
    streams = Noted()
    order, closed = StreamOrdering(streams, ()), []

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
    assert streams.log[-1] == ("after", StreamRole.CALLER, StreamRole.COMPUTE)


def test_a_verb_that_never_began_is_not_waited_for():
    """If a verb never began, its caller's stream waits for nothing."""
    streams = Noted()
    order = StreamOrdering(streams, ())
    order.arrive(None)
    assert streams.log == [("mark", StreamRole.CALLER)]


def test_tensors_on_other_devices_are_not_held():
    """A verb holds tensors of its own device only, neither None nor others."""
    streams = Noted()
    with use_streams_on_cpu(streams):
        order = stream_ordering_of(
            torch.zeros(1), None, torch.zeros(1, device="meta"), torch.zeros(2)
        )
    order.begin()
    assert streams.log.count(("hold", StreamRole.COMPUTE)) == 2


# mixed ranks


def test_ranks_on_different_devices_are_told_at_both_ends():
    """The message names the name, both ranks, what was expected and what came."""
    ends = LoopbackTransport.group(2)
    mailboxes = [MessageMatcher(end) for end in ends]
    key = MatchKey("w", 0)
    on_host = ExchangeRequest(key, ExchangeSignature("verb", "float32", (9,)), [1], [1])
    there = ExchangeRequest(key, ExchangeSignature("verb", "float32", (9,), "cuda"), [0], [0])
    there.streams = SimulatedStreams()
    mailboxes[0].open(on_host, check=False)
    mailboxes[1].open(there, check=False)
    mailboxes[0].sends.send(on_host, 1, torch.ones(9))
    mailboxes[1].sends.send(there, 0, torch.ones(9))
    for _ in range(3):
        for matcher, end in zip(mailboxes, ends, strict=True):
            matcher.sends.flush()
            for peer, bundle in end.poll():
                matcher.receive(peer, bundle)
    with pytest.raises(MismatchError) as caught:
        on_host.raise_if_failed()
    assert str(caught.value) == (
        "rank 0, verb 'w' (use 0), peer rank 1: expected a tensor on cpu, got one on cuda"
    )
    with pytest.raises(MismatchError, match="expected a tensor on cuda, got one on cpu"):
        there.raise_if_failed()
    mailboxes[0].close(on_host, on_host.error)
    assert there.sends[0][1].done(), "what nobody wants is taken, so that its sender goes on"


# mixing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [(0.25, 0.75), (0.25, 0.25), (1 / 3, 1 / 3), (0.5, 0.5)])
def test_halves_are_mixed_in_float32_and_rounded_once(dtype, weights):
    """The result is the exact sum, rounded, but for ties: at most one unit in the last place."""
    generator = torch.Generator().manual_seed(1)
    number = 1 if sum(weights) == 1.0 else 2
    own, *others = (torch.randn(999, generator=generator).to(dtype) for _ in range(1 + number))
    mixing = WeightRow(weights[0], dict.fromkeys(range(1, 1 + number), weights[1]), {})
    out = torch.empty_like(own)
    weighted_sum_on_device(mixing, torch.float32, own, others, out)
    exact = own.double() * weights[0] + sum(other.double() * weights[1] for other in others)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=0.51 * unit, atol=1e-6)


def test_the_average_of_integers_is_rounded_half_to_even():
    """A weighted sum of integers is rounded to the nearest, ties to even."""
    mixing = WeightRow(0.5, {1: 0.5}, {})
    own, other = torch.tensor([0, 2, 4, -2]), torch.tensor([1, 3, 5, -1])
    weighted_sum_on_device(mixing, torch.float64, own, [other], own)
    assert own.tolist() == [0, 2, 4, -2]
