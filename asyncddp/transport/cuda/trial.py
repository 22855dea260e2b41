"""Trial of a GPU transport before its use: checks that tensors arrive and sums are correct."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

import torch

from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.errors import PeerError
from asyncddp.tensors.allocation import make_tensor, zeros_like
from asyncddp.transport.base import Request
from asyncddp.transport.cuda.device_transport import DeviceTransport, DirectReadTransport

_BYTES = 1 << 20  # of the tensor that is sent
_SUMMED = 1 << 16  # elements of the sum


def run_trial(transport: DeviceTransport, timeout: float, peers: Collection[int] = ()) -> None:
    """Try a GPU transport: send a megabyte to peers, and sum over all ranks; collective.

    ``peers`` are the ranks that the transport reaches. The tensor is sent around the ring; if peers
    map each other's memory, all of them read it twice. The sum is tried only if the transport runs
    collectives. Raises an error for wrong data, for an error of a library, and after ``timeout``
    seconds in all.
    """
    streams, deadline = transport.streams, time.monotonic() + timeout

    def finish(request: Request) -> None:
        transport.finish(request, max(0.0, deadline - time.monotonic()), "a trial")

    def sent_by(rank: int) -> torch.Tensor:
        period = make_tensor(range(256), torch.int64, streams.device)
        return period.mul_(2 * rank + 1).to(torch.uint8).repeat(_BYTES // 256)

    with streams.stream_context(StreamRole.COMPUTE):
        data = sent_by(transport.rank)
        total = data[:_SUMMED].to(torch.float32)
    right = True
    for rank, arrived in _arrivals(transport, data, peers, finish):
        with streams.stream_context(StreamRole.COMPUTE):
            right = torch.equal(arrived, sent_by(rank)) and right
    if transport.serves_collectives:
        finish(transport.iallreduce(total))
        with streams.stream_context(StreamRole.COMPUTE):
            for rank in range(transport.size):
                total -= sent_by(rank)[:_SUMMED]
            right = right and not total.any()
    if not right:
        raise PeerError("a trial out of GPU memory did not arrive as it was sent")


def _arrivals(
    transport: DeviceTransport,
    data: torch.Tensor,
    peers: Collection[int],
    finish: Callable[[Request], None],
) -> Iterator[tuple[int, torch.Tensor]]:
    if not isinstance(transport, DirectReadTransport):
        ahead, behind = ((transport.rank + step) % transport.size for step in (1, -1))
        with transport.streams.stream_context(StreamRole.COMPUTE):
            out = zeros_like(data)
        arriving = [transport.irecv(out, behind, 0)] if behind in peers else []
        sending = [transport.isend(data, ahead, 0)] if ahead in peers else []
        for request in (*arriving, *sending):
            finish(request)
        yield from [(behind, out)] if arriving else []
        return
    for _ in range(2):
        exports = transport.export_tensor(data, dict.fromkeys(peers, 0))
        for peer in peers:
            imported = transport.import_tensor(data.shape, data.dtype, peer, 0)
            finish(imported)
            yield peer, imported.tensor
            imported.release()
        for export in exports.values():
            finish(export)
