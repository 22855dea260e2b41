"""Windows of tensors on a device that is late: what goes wrong, and who must not wait for whom."""

from __future__ import annotations

import threading

import pytest

import asyncddp as bf
from asyncddp.context import current
from tests.support.late_windows import NEVER, LateWorld, idle, made, window


@pytest.fixture
def busy():
    """Two ranks, and devices that come to nothing by themselves."""
    return LateWorld(2, NEVER)


def freed_meanwhile(streams):
    with idle(streams):
        x = made(1.0)
    bf.barrier()
    handle, side = bf.win_put_nonblocking(x, "x"), window()._staging
    bf.win_free("x")
    with pytest.raises(bf.ArgumentError, match="was freed by win_free"):
        handle.wait()
    waiting = side._streams.pinned.free_bytes
    with idle(streams):
        deadline = threading.Event()
        while side._queued and not deadline.wait(0.01):
            current().engine.progress_unthreaded()
    assert side._streams.pinned.free_bytes >= waiting + x.nbytes, "its memory is there again"
    assert side._pool.buffers == [], "no other was needed"
    bf.barrier()


def test_a_window_that_is_freed_publishes_nothing_more(busy):
    """A put pending at ``win_free`` fails and publishes nothing; its pinned memory is freed."""
    busy.run(freed_meanwhile)


def without_memory(streams):
    with idle(streams):
        x = made(1.0)
    bf.barrier()
    handle = bf.win_put_nonblocking(x, "x")

    def acquire_buffer():
        raise OSError("no more memory can be shared with the ranks of this machine")

    window()._pool.acquire_buffer = acquire_buffer
    with idle(streams):
        for _ in range(2):
            with pytest.raises(OSError, match="no more memory"):
                handle.wait()
        with pytest.raises(OSError, match="no more memory"):
            bf.win_update("x")
    del window()._pool.acquire_buffer
    with idle(streams):
        bf.win_put(x, "x")
    bf.barrier()


def test_what_cannot_be_published_is_an_error_of_its_handle(busy):
    """And of the next verb, for whoever has let go of the handle; then it may go on."""
    busy.run(without_memory)


def past_the_deadline(streams):
    with idle(streams):
        x = made(1.0)
    bf.barrier()
    with pytest.raises(bf.WaitTimeoutError) as caught:
        bf.win_put(x, "x")
    bf.barrier()
    with idle(streams):
        bf.win_flush("x")
    bf.barrier()
    return str(caught.value)


def test_a_device_that_does_not_come_to_it_is_named(busy):
    """A put past its timeout says that this rank's own device is what it waits for."""
    for rank, message in enumerate(busy.run(past_the_deadline, settings={"timeout": 0.4})):
        assert message.startswith(f"rank {rank}: win_put 'x' was not done in ")
        assert message.endswith("this rank's device has yet to do its part")


def locked_meanwhile(streams):
    """The engine goes on where another thread has the window, which may need the engine itself."""
    with idle(streams):
        x = made(1.0, zero_init=True)
    bf.barrier()
    handle = bf.win_put_nonblocking(x, "x")
    with window().lock:
        driving = threading.Thread(target=current().engine.progress)
        driving.start()
        driving.join(10.0)
        assert not driving.is_alive()
    with idle(streams):
        handle.wait()
    bf.barrier()


def test_whoever_has_a_window_does_not_hold_up_the_engine(busy):
    """The engine progresses while another thread holds the window's lock."""
    busy.run(locked_meanwhile)
