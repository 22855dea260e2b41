"""Memory that runs out while a tensor is received fails that one call, at once and on all ranks."""

from __future__ import annotations

import re
import sys
import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.engine import active_messages, announced_tensor_receiver
from asyncddp.windows import message_edge
from tests.support import BEFORE_DEADLINE, on, until
from tests.support.loops import on_each_rank
from tests.support.staged import StagedWorld

NUMEL = 50_000  # elements, whose bytes follow their message
NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"
RECEIVER = 1
VERBS = {
    "neighbor_allreduce": bf.neighbor_allreduce,
    "neighbor_allgather": bf.neighbor_allgather,
    "neighbor_allreduce one way": lambda x, name: bf.neighbor_allreduce(
        x,
        self_weight=1.0,
        src_weights={0: 1.0} if bf.rank() else {},
        dst_weights={} if bf.rank() else {1: 1.0},
        name=name,
    ),
    "pair_gossip": lambda x, name: bf.pair_gossip(x, 1 - bf.rank(), name=name),
}


@contextmanager
def without_memory(module, function, numel=NUMEL):
    """While entered, the receiver has no memory for the first tensor of so many elements."""
    allocate, failed = getattr(module, function), []

    def allocate_or_fail(*args):
        receiver = sys._getframe(1).f_locals.get("self")
        shape = next(one for one in args if isinstance(one, tuple))
        if not failed and shape == (numel,) and getattr(receiver, "_rank", RECEIVER) == RECEIVER:
            failed.append(shape)
            raise torch.OutOfMemoryError(NO_MEMORY)
        return allocate(*args)

    with mock.patch.object(module, function, allocate_or_fail):
        yield
    assert failed, "there was memory for all"


@contextmanager
def receiver_without_memory(module=announced_tensor_receiver, function="empty_on", numel=NUMEL):
    if bf.rank() != RECEIVER:
        yield
        return
    with without_memory(module, function, numel):
        yield


def error_of(call):
    """The error of a call; where its own part had ended well, the next call raises it."""
    channels = bf.current().engine.matcher.channels

    def call_and_next():
        call()
        assert bf.rank() != RECEIVER
        until(lambda: channels.late_error is not None)
        bf.barrier()

    with pytest.raises(bf.PeerError) as caught:
        call_and_next()
    return caught.value


def assert_names_it(error, verb, name, use=0):
    """The receiver's error has the cause; the others name the receiver and its reason."""
    reason = (
        f"rank 1, {verb} '{name}' (use {use}): {4 * NUMEL} bytes of rank 0 could not be received "
        f"(OutOfMemoryError: {NO_MEMORY}). Where memory is short, use smaller tensors"
    )
    assert reason in str(error)
    assert error.origin == RECEIVER
    if bf.rank() == RECEIVER:
        assert isinstance(error.__cause__, torch.OutOfMemoryError)
    else:
        assert f"'{name}' (use {use}), given up by rank 1: rank 1, {verb}" in str(error)


def one_call_fails(verb):
    bf.set_topology(topology.complete(bf.size()))
    x, started = torch.ones(NUMEL), time.monotonic()
    with receiver_without_memory():
        error = error_of(lambda: VERBS[verb](x, name="x"))
    assert time.monotonic() - started < BEFORE_DEADLINE
    name = "x.0-1" if verb == "pair_gossip" else "x"
    assert_names_it(error, verb.partition(" ")[0], name)
    for _ in range(3):
        result = VERBS[verb](x, name="x")
        assert ((result == 1) | (result == 2)).all()


@pytest.mark.parametrize("verb", VERBS)
@on("loopback-2", "mpi-2")
def test_a_blocking_call_fails_on_both_ranks_and_the_next_ones_work(world, verb):
    """Both ranks raise PeerError with verb, key, peer and size; the same name works again."""
    world.run(one_call_fails, verb)


@pytest.mark.parametrize("verb", ["neighbor_allreduce", "pair_gossip"])
def test_memory_of_a_device_may_run_out_as_well(verb):
    """Without memory of a device for a received tensor one call fails, as on the host."""
    StagedWorld(2).run(one_call_fails, verb)


@on("loopback-2", "mpi-2")
@on_each_rank
def test_a_sender_fails_in_the_same_call():
    """A rank that only sends raises in the call whose tensor was not received."""
    x = torch.ones(NUMEL)
    with receiver_without_memory(), pytest.raises(bf.PeerError) as caught:
        VERBS["neighbor_allreduce one way"](x, name="x")
    assert_names_it(caught.value, "neighbor_allreduce", "x")


@on("loopback-2", "mpi-2")
@on_each_rank
def test_other_calls_under_way_are_not_concerned():
    """Of three non-blocking calls only the one without memory fails, on both ranks."""
    bf.set_topology(topology.complete(bf.size()))
    sizes = {"a": NUMEL - 1, "b": NUMEL, "c": NUMEL + 1}
    with receiver_without_memory():
        handles = {
            name: bf.neighbor_allreduce_nonblocking(torch.ones(size), name=name)
            for name, size in sizes.items()
        }
        error = error_of(handles["b"].wait)
        for name in ("a", "c"):
            assert (handles[name].wait() == 1).all()
    assert_names_it(error, "neighbor_allreduce", "b")
    bf.barrier()


@on("mpi-2")
@on_each_rank
def test_a_sender_that_is_through_is_told_by_its_next_call():
    """Where the sender's call has ended, its next one raises what the receiver raised.

    From the second use on the sender waits for no acknowledgement.
    """
    bf.set_topology(topology.complete(bf.size()))
    x = torch.ones(NUMEL)
    for _ in range(3):
        bf.neighbor_allreduce(x, name="x")
    with receiver_without_memory():
        error = error_of(lambda: bf.neighbor_allreduce(x, name="x"))
    assert_names_it(error, "neighbor_allreduce", "x", use=3)
    assert (bf.neighbor_allreduce(x, name="y") == 1).all()


@on("mpi-2")
@on_each_rank
def test_bytes_without_memory_to_drop_them_are_dropped_later():
    """The bytes of the failed call leave the network once there is memory again."""
    bf.set_topology(topology.complete(bf.size()))
    announced, x = bf.current().engine.matcher._announced, torch.ones(NUMEL)
    no_empty = mock.patch.object(announced_tensor_receiver, "empty", side_effect=MemoryError)
    with receiver_without_memory(), no_empty:
        error_of(lambda: bf.neighbor_allreduce(x, name="x"))
        if bf.rank() == RECEIVER:
            assert len(announced._unwanted) == 1, "there was no memory to drop the bytes either"
    for _ in range(2):
        bf.barrier()
        assert (bf.neighbor_allreduce(x, name="y") == 1).all()
    assert announced._unwanted == []


SHORTAGES = {
    "put": (active_messages, "empty", bf.win_put),
    "accumulate": (active_messages, "empty", bf.win_accumulate),
    "sum": (message_edge, "empty", bf.win_accumulate),
}


@pytest.mark.parametrize("kind", SHORTAGES)
@on("mpi-2")
@on_each_rank
def test_a_message_to_a_window_fails_on_both_ranks_and_the_next_one_arrives(kind):
    """Writer and reader raise PeerError at once, and the edge takes the next put."""
    module, function, verb = SHORTAGES[kind]
    x, right = torch.zeros(NUMEL), topology.ring(2, style="right")
    bf.set_topology(right)
    bf.win_create(x, "w", zero_init=True)
    ones = torch.ones(NUMEL)
    if bf.rank() == 0 and kind == "sum":
        bf.win_put(ones, "w")  # to which the next one is added
    bf.barrier()
    if bf.rank() == RECEIVER:
        channels = bf.current().engine.matcher.channels
        with without_memory(module, function):
            bf.barrier()
            until(lambda: channels.late_error is not None)
        with pytest.raises(bf.PeerError, match="OutOfMemoryError: CUDA out of memory") as caught:
            bf.barrier()
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    else:
        bf.barrier()
        started = time.monotonic()
        error = error_of(lambda: verb(ones, "w"))
        assert re.search("message to windows, given up by rank 1: .*CUDA out of", str(error))
        assert time.monotonic() - started < BEFORE_DEADLINE
    bf.barrier()
    if bf.rank() == 0:
        bf.win_put(3 * ones, "w")
    bf.barrier()
    if bf.rank() == RECEIVER:
        bf.win_update("w", 0.0, {0: 1.0})
        assert (x == 3).all()
    bf.barrier()
