"""Ranks whose tensors count as lying on a device, so that GPUs' transports serve them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import asyncddp as bf
from asyncddp.device.stream_registry import use_streams_on_cpu
from asyncddp.testing.outcome import Outcome
from asyncddp.testing.rank_function_call import DEFAULT_SETTINGS
from asyncddp.transport.cuda import staged_transport as cuda_staged
from asyncddp.transport.loopback import LoopbackTransport
from tests.support.simulated_streams import SimulatedStreams
from tests.support.worlds import LoopbackWorld

__all__ = ["StagedWorld", "on_a_stand_in"]


@contextmanager
def on_a_stand_in(
    laziness: int = 1, piece: int = 60_000, pace: float | None = None
) -> Iterator[SimulatedStreams]:
    """While entered, host tensors count as a device's, copied late and in small pieces.

    With a pace the device goes on by itself, as it must where a transport waits for another's work.
    """
    streams, before = SimulatedStreams(laziness, pace=pace), cuda_staged._PIECE
    cuda_staged._PIECE = piece
    try:
        with use_streams_on_cpu(streams):
            yield streams
    finally:
        cuda_staged._PIECE = before


class StagedWorld(LoopbackWorld):
    """Ranks that are threads of this process, with what stands in for a device.

    Args:
        size: Number of ranks.
        laziness: As of :class:`SimulatedStreams`.
        piece: Bytes of a piece.
    """

    def __init__(self, size: int, laziness: int = 1, piece: int = 60_000) -> None:
        super().__init__(size)
        self._laziness, self._piece = laziness, piece

    def outcomes(
        self,
        case: Callable[..., Any],
        *args: Any,
        settings: Mapping[str, Any] | None = None,
        limit: float = 30.0,
        **kwargs: Any,
    ) -> list[Outcome]:
        with on_a_stand_in(self._laziness, self._piece):
            return super().outcomes(case, *args, settings=settings, limit=limit, **kwargs)

    def run_bare(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        streams = SimulatedStreams(self._laziness)
        ends = [
            cuda_staged.CudaStagedTransport(end, streams)
            for end in LoopbackTransport.group(self.size)
        ]
        with bf.local_world(self.size, **DEFAULT_SETTINGS) as world:
            return world.run(lambda: case(ends[bf.rank()], *args, **kwargs))
