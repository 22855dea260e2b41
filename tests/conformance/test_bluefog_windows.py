"""BlueFog's windows on four ranks, by the rules of BlueFog's own tests.

The topology is exponential-2, negotiation is "skipped", and a barrier stands between phases.
"""

from __future__ import annotations

import time

import pytest
import torch

import asyncddp.integrations.bluefog as bf
from tests.support import FileEvent, on

worlds = on("loopback-4", "shared_memory-4")

SHAPES = [(23,), (23, 23), (23, 23, 23)]
FLOATS = [torch.float32, torch.float64]


def filled(value, shape=(23,), dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype)


def assert_is(tensor, value, tolerance=1e-5):
    assert (tensor.double() - value).abs().max().item() <= tolerance


def begin(topology_fn=None, is_weighted=False):
    """The rank, the number of ranks, and in-neighbours."""
    bf.init(topology_fn, is_weighted)
    bf.set_skip_negotiate_stage(True)
    return bf.rank(), bf.size(), bf.in_neighbor_ranks()


def window(value, name="x", shape=(23,), dtype=torch.float32, **options):
    x = filled(value, shape, dtype)
    assert bf.win_create(x, name, **options) is True
    return x


def create_update_free():
    r, _, near = begin()
    for dtype in FLOATS:
        for shape in SHAPES:
            x = window(r, "x", shape, dtype)
            assert bf.win_update("x") is x, "the very object, of which buffers begin as copies"
            assert_is(x, r)
            bf.barrier()
            weights = dict.fromkeys(near, 1 / (len(near) + 1))
            y = bf.win_update("x", self_weight=1 / (len(near) + 1), neighbor_weights=weights)
            assert y is x
            assert_is(x, r)
            bf.barrier()
            assert bf.win_free("x") == 1
    for count in range(3):
        window(r, f"w{count}")
        assert bf.get_current_created_window_names() == [f"w{k}" for k in range(count + 1)]
    assert bf.win_create(filled(r), "w0") is False, "there is one of that name"
    bf.win_free("w1")
    assert bf.get_current_created_window_names() == ["w0", "w2"]
    assert bf.win_free() == 1
    assert bf.win_free() == 1, "nothing is left"
    assert bf.get_current_created_window_names() == []
    with pytest.raises(KeyError, match="there is no window 'w0'"):
        bf.win_free("w0")
    with pytest.raises(KeyError, match="there is no window 'w0'"):
        bf.win_update("w0")
    with pytest.raises(ValueError, match="there is no window 'w0'"):
        bf.get_win_version("w0")


@worlds
def test_create_update_free(world):
    """Windows come and go; an update of what nobody has put leaves things as they are."""
    world.run(create_update_free)


def weighted_star():
    r, n, near = begin(bf.StarGraph, is_weighted=True)
    x = window(float(r), dtype=torch.float64)
    x *= 2
    bf.win_update("x")
    assert_is(x, 0 if r == 0 else r / n + 2 * r * (1 - 1 / n))
    bf.win_free()
    x = window(float(r))
    for _ in range(2):
        assert bf.win_update_then_collect("x") is x
        assert_is(x, r * (len(near) + 1))
        bf.barrier()


@worlds
def test_weights_of_a_star_and_collecting_twice(world):
    """Buffers begin as copies, and are empty once they were collected."""
    world.run(weighted_star)


def put():
    r, _, near = begin()
    for dtype in FLOATS:
        x = window(r, dtype=dtype)
        handle = bf.win_put_nonblocking(x, "x")
        assert type(handle) is int
        assert bf.win_wait(handle) is True
        bf.barrier()
        assert_is(bf.win_update("x"), (r + sum(near)) / (len(near) + 1))
        bf.barrier()
        bf.win_free("x")
    ramp = torch.arange(7.0)
    bf.win_create(ramp + r, "ramp")
    assert bf.win_put(ramp + r, "ramp") is True
    bf.barrier()
    assert_is(bf.win_update("ramp") - ramp, (r + sum(near)) / (len(near) + 1))


@worlds
def test_put_and_update(world):
    """The mean of the neighbourhood, also of tensors whose elements differ."""
    world.run(put)


def versions(how):
    r, _, near = begin()
    window(r)
    assert bf.get_win_version("x") == dict.fromkeys(near, 0)
    bf.barrier()
    if how == "put":
        bf.win_put(filled(r), "x")
    else:
        bf.win_get("x")
    bf.barrier()
    assert bf.get_win_version("x") == dict.fromkeys(near, 1)
    bf.win_update("x", clone=True)
    assert bf.get_win_version("x") == dict.fromkeys(near, 0)


@worlds
@pytest.mark.parametrize("how", ["put", "get"])
def test_versions_count_what_was_written_since_the_last_update(world, how):
    """Zeros, ones, zeros."""
    world.run(versions, how)


def some_targets():
    r, n, near = begin()
    before = (r - 1) % n
    x = window(r)
    bf.win_put(x, "x", dst_weights={(r + 1) % n: 1.23})
    bf.barrier()
    bf.win_update("x")
    assert_is(x, (r * len(near) + 1.23 * before) / (len(near) + 1))
    bf.barrier()
    bf.win_free()
    x = window(r)
    bf.win_accumulate(x, "x")
    bf.barrier()
    bf.win_update("x")
    assert_is(x, r + sum(near) / (len(near) + 1))
    bf.barrier()
    bf.win_free()
    x = window(r)
    bf.win_accumulate(filled(r), "x", dst_weights={(r + 1) % n: 1.23})
    bf.barrier()
    bf.win_update("x", self_weight=0.5, neighbor_weights={before: 0.5})
    assert_is(x, r + 1.23 * before / 2)
    with pytest.raises(ValueError, match="not an out-neighbour"):
        bf.win_put(x, "x", dst_weights={(r - 1) % n: 1.0})
    with pytest.raises(ValueError, match="not an in-neighbour"):
        bf.win_update("x", self_weight=0.5, neighbor_weights={(r + 1) % n: 0.5})
    with pytest.raises(ValueError, match="expected neither"):
        bf.win_update("x", self_weight=0.5)


@worlds
def test_puts_and_sums_with_weights(world):
    """For some of the neighbours; what is no neighbour is refused."""
    world.run(some_targets)


def get():
    r, n, near = begin()
    before = (r - 1) % n
    x = window(r)
    bf.barrier()
    assert bf.win_get("x") is True
    bf.barrier()
    y = bf.win_update("x", clone=True)
    assert y is not x
    assert_is(x, r)
    assert_is(y, (r + sum(near)) / (len(near) + 1))
    bf.barrier()
    bf.win_get("x", src_weights={before: 1.23})
    bf.barrier()
    y = bf.win_update("x", self_weight=0.5, neighbor_weights={before: 0.5})
    assert_is(y, (r + 1.23 * before) / 2)


@worlds
def test_get(world):
    """What neighbours hold, weighted where it is asked for; a clone leaves the tensor alone."""
    world.run(get)


def mutex(folder):
    given_back = FileEvent(folder / "given back")
    r, _, _ = begin(bf.FullyConnectedGraph)
    window(r)
    if r == 0:
        with bf.win_mutex("x", for_self=True):
            bf.barrier()
            time.sleep(0.5)
            given_back.set()
    else:
        bf.barrier()
        with bf.win_mutex("x", ranks=[0]):
            assert given_back.is_set()
    bf.barrier()


@worlds
def test_a_holder_keeps_all_writers_out(world, tmp_path):
    """All others wait until rank 0 gives its mutex back."""
    world.run(mutex, tmp_path)


def one_writers_slot():
    r, _, _ = begin(bf.FullyConnectedGraph)
    window(r)
    if r == 0:
        with bf.win_mutex("x", for_self=True, ranks=[1]):
            bf.barrier()
            bf.barrier()
        bf.barrier()
    else:
        bf.barrier()
        if r != 1:
            with bf.win_mutex("x", ranks=[0]):
                pass
        bf.barrier()
        with bf.win_mutex("x", ranks=[0]), bf.win_lock("x"):
            pass
        bf.barrier()


@worlds
def test_a_holder_may_keep_one_writer_out(world):
    """The others pass while it is held."""
    world.run(one_writers_slot)


def many_puts_and_handles():
    r, _, near = begin()
    window(r)
    handles = [bf.win_put_nonblocking(filled(float(k)), "x") for k in range(10)]
    bf.win_cancel(handles.pop())
    for handle in handles:
        bf.win_poll(handle)
        assert bf.win_wait(handle)
    assert bf.win_wait(handles[0]) is False, "as in BlueFog, with a warning in the log"
    with pytest.raises(ValueError, match="nobody has waited for yet"):
        bf.win_poll(handles[0])
    bf.barrier()
    source = near[0]
    y = bf.win_read_neighbor("x", rank_=source)
    assert_is(y, 9.0)
    assert bf.neighbor_win_put is bf.win_put
    assert bf.neighbor_win_accumulate_nonblocking is bf.win_accumulate_nonblocking
    bf.barrier()


@worlds
def test_many_puts_at_once(world):
    """The last one is seen; handles are numbers that are gone after waiting."""
    world.run(many_puts_and_handles)
