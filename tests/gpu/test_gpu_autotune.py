"""Autotuning of models on a GPU: steps are timed there, and no step waits because of it."""

from __future__ import annotations

import time

import torch

from asyncddp.optim.step_timer import StepTimer
from tests.unit.optim.autotune_reference import one_step, search, short, wrapped

CYCLES = 200_000_000  # some 100 ms of a GPU


def test_steps_are_timed_on_the_gpu(device):
    """A step lasts as long as its kernels; the host goes on meanwhile."""
    timer = StepTimer(device)
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    timer.mark()
    for cycles in (CYCLES, 1):
        torch.cuda._sleep(cycles)
        timer.mark()
    issued = time.perf_counter() - begun
    long, short_one = timer.durations()
    assert long > 5 * short_one
    assert long > issued


def test_a_search_ends_on_all_ranks(ranks, device):
    """With one choice."""

    def case():
        model, optimizer = wrapped(autotune=short(), device=device)
        search(optimizer, model)
        one_step(optimizer, model, 0)
        return optimizer.autotune.result.setting

    every = ranks.run(case)
    assert every == [every[0]] * len(every)
