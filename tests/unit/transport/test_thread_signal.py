"""Signals wake the threads that wait for them, all of them, and nobody else."""

from __future__ import annotations

import threading
import time

from asyncddp.transport.thread_signal import ThreadSignal, ThreadWakeQueue, set_signals


def start_waiting(signal, results, timeout=30.0):
    thread = threading.Thread(target=lambda: results.append(signal.wait(timeout)))
    thread.start()
    return thread


def wait_for(condition):
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_signal_that_was_set_before_does_not_block():
    """A signal is remembered until it is cleared."""
    signal = ThreadSignal(ThreadWakeQueue())
    signal.set()
    assert signal.wait(30.0)
    assert signal.wait(30.0)
    signal.clear()
    assert not signal.wait(0.0)


def test_all_threads_of_all_signals_are_woken():
    """Woken threads wake each other until none waits any more, though several wait for one."""
    queue, results = ThreadWakeQueue(), []
    signals = [ThreadSignal(queue) for _ in range(10)]
    threads = [start_waiting(signal, results) for signal in signals for _ in range(3)]
    wait_for(lambda: all(len(signal._waiters) == 3 for signal in signals))
    set_signals(signals, queue)
    for thread in threads:
        thread.join(30.0)
    assert results == [True] * 30


def test_a_thread_that_gave_up_does_not_hold_up_the_others():
    """One whose time ran out just when it was to be woken wakes the next one all the same."""
    for _ in range(20):
        queue, results = ThreadWakeQueue(), []
        signals = [ThreadSignal(queue) for _ in range(20)]
        threads = [
            start_waiting(signal, results, 0.001 if number % 2 else 30.0)
            for number, signal in enumerate(signals)
        ]
        wait_for(lambda signals=signals: all(signal._waiters for signal in signals[::2]))
        set_signals(signals, queue)
        for thread in threads:
            thread.join(5.0)
            assert not thread.is_alive()
