"""Staged collectives of several parts: what they give, and how much host memory they pin."""

from __future__ import annotations

import time

import pytest
import torch

from asyncddp.tensors.dtypes import DTYPES
from asyncddp.transport.cuda import staged_transport as cuda_staged
from asyncddp.transport.cuda.staged_pipeline import MAX_PIECES_IN_FLIGHT
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport
from asyncddp.transport.loopback import LoopbackTransport
from tests.support.simulated_streams import SimulatedStreams

PIECE = 8192


@pytest.fixture
def pinned(monkeypatch):
    """The sizes of all pinned buffers."""
    sizes = []
    monkeypatch.setattr(cuda_staged, "_PIECE", PIECE)
    monkeypatch.setattr(
        SimulatedStreams,
        "allocate_pinned",
        lambda _, size: sizes.append(size) or torch.zeros(size, dtype=torch.uint8),
    )
    return sizes


def finish_together(requests):
    deadline = time.monotonic() + 60
    while not all([request.done() for request in requests]):
        assert time.monotonic() < deadline


def group(size):
    return [CudaStagedTransport(end, SimulatedStreams(1)) for end in LoopbackTransport.group(size)]


def test_what_is_read_and_written_of_a_reduce_scatter_shares_a_buffer(pinned):
    """No buffer is larger than a piece."""
    x, outs = torch.arange(20_000.0), torch.zeros(2, 10_000)
    both = zip(group(2), outs, strict=True)
    finish_together([transport.ireduce_scatter(x, out) for transport, out in both])
    assert torch.equal(outs.view(-1), 2 * x)
    assert pinned == [PIECE] * 2 * MAX_PIECES_IN_FLIGHT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "counts",
    [[3000], [0, 5000], [2001] * 3, [7, 0, 9000, 1024], [0, 0, 0, 0]],
    ids=lambda counts: "-".join(map(str, counts)),
)
def test_an_allgather_pins_a_few_pieces_whatever_its_size(pinned, counts, dtype):
    """It gives what the host gives, and a rank pins no more than the pieces in flight."""
    parts = [torch.randint(0, 100, (count,)).to(dtype) for count in counts]
    outs = [torch.zeros(sum(counts), dtype=dtype) for _ in counts]
    every = zip(group(len(counts)), parts, outs, strict=True)
    finish_together([rank.iallgather(part, out, counts) for rank, part, out in every])
    for out in outs:
        assert torch.equal(out, torch.cat(parts))
    assert max(pinned) <= PIECE
    assert len(pinned) <= len(counts) * MAX_PIECES_IN_FLIGHT


def test_an_allgather_of_one_long_part_has_as_many_pieces_on_all_ranks(pinned):
    """A rank whose part has ended takes part in the pieces of the others' parts."""
    counts, begun = [1, 0, 100_000], []
    ranks = group(3)
    for rank in ranks:
        gather = rank.base.iallgather

        def counted(send, out, sizes, rank=rank.rank, gather=gather):
            begun.append((rank, tuple(sizes)))
            return gather(send, out, sizes)

        rank.base.iallgather = counted
    parts, outs = [torch.full((n,), 3, dtype=torch.uint8) for n in counts], torch.zeros(3, 100_001)
    outs = outs.to(torch.uint8)
    every = zip(ranks, parts, outs, strict=True)
    finish_together([rank.iallgather(part, out, counts) for rank, part, out in every])
    assert bool((outs == 3).all())
    of_rank = [[sizes for number, sizes in begun if number == rank.rank] for rank in ranks]
    assert of_rank[0] == of_rank[1] == of_rank[2]
    assert of_rank[0][0] == (1, 0, 2048)
    assert set(of_rank[0][1:-1]) == {(0, 0, 2048)}
