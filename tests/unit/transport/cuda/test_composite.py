"""Transports of GPU tensors chosen by peer: what goes by which, and in what order they close."""

from __future__ import annotations

import pytest
import torch

from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.errors import ArgumentError
from asyncddp.transport.cuda.composite import CompositeTransport
from asyncddp.transport.cuda.ipc.ipc_transport import CudaIPCTransport
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport
from tests.support.ipc import Pair
from tests.support.simulated_streams import SimulatedStreams


class Mixed(Pair):
    """Three ranks, of which 0 and 1 read each other's memory; what goes to rank 2 is staged."""

    def __init__(self):
        super().__init__(near=(0, 1), size=3)
        self.ipc = self.transports
        self.transports = [
            CompositeTransport.combine(
                {"cuda_ipc": own},
                {
                    peer: "cuda_ipc" if {rank, peer} == {0, 1} else "cuda_staged"
                    for peer in range(3)
                    if peer != rank
                },
                "cuda_staged",
            )
            for rank, own in enumerate(self.ipc)
        ]


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_near_peers_read_in_place_and_far_ones_are_sent_the_whole(factor):
    """One export reaches a near and a far peer; only the near one reads this rank's memory."""
    three, data, got = Mixed(), torch.randn(10), torch.zeros(10)
    one, near, far = three.transports
    exported = one.export_tensor(data, {1: 5, 2: 6}, factor)
    assert list(exported) == [1, 2]
    imports = [
        near.import_tensor((10,), data.dtype, 0, 5),
        far.import_tensor((10,), data.dtype, 0, 6),
    ]
    three.finish(*imports)
    near.streams.copy(got, imports[0].tensor, StreamRole.COMPUTE)
    for imported in imports:
        imported.release()
    three.finish(*exported.values())
    assert all(export.reusable() for export in exported.values())
    while three.work():
        pass
    assert torch.equal(got, data * factor)
    assert torch.equal(imports[1].tensor, data * factor)
    assert [len(rank._importer.imported) for rank in three.ipc] == [0, 1, 0]
    assert [rank.memory.buffers.num_allocated for rank in three.ipc] == [1, 0, 0]


def test_what_goes_only_to_far_peers_takes_no_memory_that_is_exported():
    """Messages to a far peer, and to this rank itself, are staged."""
    three, data = Mixed(), torch.randn(10)
    for peer in (2, 0):
        out = torch.zeros(10)
        sending = three.transports[0].isend(data, peer, 1)
        three.finish(three.transports[peer].irecv(out, 0, 1), sending)
        assert torch.equal(out, data)
    assert three.ipc[0].memory.buffers.num_allocated == 0


def test_a_single_transport_that_serves_all_peers_is_not_wrapped():
    """``cuda_ipc`` between ranks that all reach each other stays what it is."""
    one, _ = Pair().transports
    assert type(one) is CudaIPCTransport
    assert CompositeTransport.combine({"cuda_ipc": one}, {1: "cuda_ipc"}, "cuda_staged") is one


def test_it_has_the_names_of_what_was_opened_and_serves_their_device():
    """Its name is what ranks have agreed on, which its errors tell."""
    one, *_ = Mixed().transports
    assert one.name == "cuda_ipc"
    assert one.for_device(SimulatedStreams()) is one
    strange = SimulatedStreams()
    strange.device = torch.device("cuda", 1)
    with pytest.raises(ArgumentError, match="for which cuda_ipc was opened"):
        one.for_device(strange)


def test_transports_close_in_the_order_of_preference_and_the_staging_last(monkeypatch):
    """What waits for readers closes before what closes the host transport under it."""
    one, *_ = Mixed().transports
    closed = []
    for kind in (CudaIPCTransport, CudaStagedTransport):
        monkeypatch.setattr(kind, "close", lambda self: closed.append(type(self).__name__))
    one.close()
    assert closed == ["CudaIPCTransport", "CudaStagedTransport"]
