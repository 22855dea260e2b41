"""Verification that a device transport moves and sums data rightly, before it is used."""

from __future__ import annotations

import torch

from asyncddp.device.streams import DeviceStreams, StreamRole
from asyncddp.tensors.allocation import make_tensor, zeros_like
from asyncddp.transport.base import Transport

_TRIAL = 1 << 16  # bytes


def verify_transport(
    transport: Transport, streams: DeviceStreams, timeout: float, *, messages: bool = True
) -> bool:
    """Verify a transport: send a pattern around the ring and form a sum; collective.

    Args:
        transport: The transport.
        streams: Streams of its device.
        timeout: Seconds after which it counts as failed.
        messages: Whether to send the pattern, or to form the sum alone.
    """

    def made(rank: int) -> torch.Tensor:
        """Make the pattern that a rank sends."""
        pattern = make_tensor(range(_TRIAL), torch.int64, streams.device).mul_(2 * rank + 1)
        return pattern.to(torch.uint8)

    ahead, behind = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    with streams.stream_context(StreamRole.COMPUTE):
        data, expected = made(transport.rank), made(behind)
        out = zeros_like(expected) if messages else expected
        total = data.to(torch.float32)
    try:
        if messages:
            arriving, sending = transport.irecv(out, behind, 0), transport.isend(data, ahead, 0)
            transport.finish(arriving, timeout, "trial")
            transport.finish(sending, timeout, "trial")
        transport.finish(transport.iallreduce(total), timeout, "trial")
    except RuntimeError:  # a peer's error, or that of a library
        return False
    with streams.stream_context(StreamRole.COMPUTE):
        exact = torch.stack([made(rank).to(torch.float32) for rank in range(transport.size)]).sum(0)
        return bool(torch.equal(out, expected) and torch.equal(total, exact))
