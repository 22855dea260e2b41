"""The trial of a wire for tensors on devices, before anybody relies on it."""

from __future__ import annotations

import torch

from asyncddp.memory.allocate import values, zeros_like
from asyncddp.memory.streams import DeviceStreams, Queue
from asyncddp.transport.contract import Transport

__all__ = ["try_out"]

_TRIAL = 1 << 16  # bytes


def try_out(
    wire: Transport, streams: DeviceStreams, timeout: float, *, messages: bool = True
) -> bool:
    """Send a pattern around the ring, form a sum, and look whether both are right; collective.

    Args:
        wire: The wire.
        streams: Of its device.
        timeout: Seconds after which it counts as failed.
        messages: Whether to send the pattern, or to form the sum alone.
    """

    def made(rank: int) -> torch.Tensor:
        """What a rank sends in the trial."""
        pattern = values(range(_TRIAL), torch.int64, streams.device).mul_(2 * rank + 1)
        return pattern.to(torch.uint8)

    ahead, behind = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    with streams.working(Queue.WORK):
        data, expected = made(wire.rank), made(behind)
        out = zeros_like(expected) if messages else expected
        total = data.to(torch.float32)
    try:
        if messages:
            arriving, sending = wire.irecv(out, behind, 0), wire.isend(data, ahead, 0)
            wire.finish(arriving, timeout, "trial")
            wire.finish(sending, timeout, "trial")
        wire.finish(wire.iallreduce(total), timeout, "trial")
    except RuntimeError:  # a peer's, or that of a library which cannot do what it was asked
        return False
    with streams.working(Queue.WORK):
        exact = torch.stack([made(rank).to(torch.float32) for rank in range(wire.size)]).sum(0)
        return bool(torch.equal(out, expected) and torch.equal(total, exact))
