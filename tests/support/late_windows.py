"""Ranks whose devices are late, for tests of windows."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import asyncddp as bf
from asyncddp.context import current
from asyncddp.windows import device_staging, windows_of
from tests.support.lazy_streams import LazyStreams
from tests.support.worlds import LoopbackWorld

__all__ = ["NEVER", "LateWorld", "idle", "made", "peer", "window"]

NEVER = 10**9


class LateWorld(LoopbackWorld):
    """Ranks with a device each, which does nothing until it is asked often enough."""

    def __init__(self, size, laziness):
        super().__init__(size)
        self.devices = [LazyStreams(laziness) for _ in range(size)]

    def run(self, case, *args, **more):
        def of(tensor):
            return self.devices[bf.rank()]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_staging, "streams_of", of)
            patch.setattr("asyncddp.windows.window.streams_of", of)
            return super().run(lambda: case(self.devices[bf.rank()], *args), **more)


def made(value, size=300, **more):
    x = torch.full((size,), float(value))
    bf.win_create(x, "x", **more)
    return x


def window():
    return windows_of(current()).find("test", "x")


@contextmanager
def idle(streams):
    """While inside, the device answers."""
    before, streams._laziness = streams._laziness, 0
    try:
        yield
    finally:
        streams._laziness = before


def peer():
    return 1 - bf.rank()
