"""Which threads are bound to a device, and when: the library's before they use it, others never."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.config import Config
from asyncddp.transport.cuda import negotiation
from asyncddp.transport.cuda.nccl.communicator import open_in_thread, run_in_threads
from tests.support import DEFAULT_SETTINGS, until
from tests.support.late_windows import LateWorld, made, window
from tests.support.simulated_streams import SimulatedStreams
from tests.support.staged import on_a_stand_in

RANKS, WORKERS = {"rank-0", "rank-1"}, {"asyncddp-progress-0", "asyncddp-progress-1"}


def verb():
    """A verb that nobody waits for."""
    bf.set_topology(topology.ring(2))
    handle = bf.neighbor_allreduce_nonblocking(torch.ones(70_000))
    until(handle.poll)


def publication(_):
    """A put whose copy to the host ends after its caller has gone on; nobody waits for it."""
    x = made(1.0)
    handle = bf.win_put_nonblocking(x, "x")
    until(lambda: not window()._staging._queued)
    handle.wait()


def blocking():
    """A verb that runs on its caller's thread."""
    bf.set_topology(topology.ring(2))
    bf.neighbor_allreduce(torch.ones(70_000))


def test_the_progress_thread_is_bound_before_it_uses_a_device():
    """Each progress thread is bound once, before its first event query; callers' never are."""
    with on_a_stand_in(laziness=20) as streams, bf.local_world(2, **DEFAULT_SETTINGS) as world:
        world.run(verb)
    assert dict(streams.bound) == dict.fromkeys(WORKERS, 1)
    assert set(streams.unbound_uses) == RANKS


def test_the_progress_thread_is_bound_before_it_publishes_a_window():
    """Each progress thread is bound once to its rank's device, before it queries a copy's event."""
    world = LateWorld(2, laziness=20)
    world.run(publication)
    for rank, streams in enumerate(world.devices):
        assert dict(streams.bound) == {f"asyncddp-progress-{rank}": 1}
        assert set(streams.unbound_uses) == {f"rank-{rank}"}


def test_a_blocking_verb_binds_no_thread_of_its_caller():
    """A blocking verb uses the device on its caller's thread, which stays as it is."""
    with on_a_stand_in(laziness=20) as streams, bf.local_world(2, **DEFAULT_SETTINGS) as world:
        world.run(blocking)
    assert set(streams.unbound_uses) == RANKS
    assert set(streams.bound) <= WORKERS


# the threads of NCCL


def test_threads_that_open_and_close_communicators_are_bound_first():
    """open_in_thread and run_in_threads bind their threads, and not the caller's."""
    streams, seen = SimulatedStreams(), []

    def call():
        name = threading.current_thread().name
        seen.append((name, streams.bound[name]))

    opening: Future = open_in_thread(call, streams)
    opening.result(timeout=30.0)
    run_in_threads([call], streams, timeout=30.0)
    assert seen == [("asyncddp-nccl-opening", 1), ("asyncddp-nccl", 1)]
    assert sum(streams.bound.values()) == 2


# opening


def test_transports_are_opened_on_the_rank_s_own_device(monkeypatch):
    """While transports are negotiated the rank's device is current, and no longer than that."""
    log = []

    class Entered:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            log.append(("enter", self.device))

        def __exit__(self, *_):
            log.append(("leave", self.device))

    class Transport:
        rank, scope = 1, None

    for name, value in {
        "detect_capabilities": lambda *_: None,
        "default_device_index": lambda *_: 1,
        "streams_of_device": lambda device: device,
        "negotiate_transport": lambda *_, **__: log.append("negotiated"),
    }.items():
        monkeypatch.setattr(negotiation, name, value)
    monkeypatch.setattr(torch.cuda, "device", Entered)
    config = Config.from_environment({"ASYNCDDP_DEVICE_TRANSPORTS": "auto"})
    negotiation.negotiate_from_config(Transport(), config, machine=0, rank_on_host=1)
    assert log == [("enter", 1), "negotiated", ("leave", 1)]
