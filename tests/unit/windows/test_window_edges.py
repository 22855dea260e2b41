"""Edges of a window: what is offered to gets stays while it is held or lent."""

from __future__ import annotations

import torch

from asyncddp.windows.staging import BufferPool
from asyncddp.windows.window_edges import WindowEdges


def published(edges, pool, value, **more):
    buffer = pool.acquire_buffer()
    buffer.tensor.fill_(value)
    edges.publish_for_gets(buffer, 1.0, 0, **more)
    buffer.drop()


def test_what_is_held_stays_while_the_next_are_published():
    """A reader's buffer is not used anew before it is dropped."""
    edges, pool = WindowEdges({}), BufferPool(None, (4,), torch.float32)
    assert edges.hold_offered() is None
    published(edges, pool, 1.0, p=0.5)
    offered = edges.hold_offered()
    for value in (2.0, 3.0, 4.0):
        published(edges, pool, value)
    assert (offered.p, offered.buffer.tensor.tolist()) == (0.5, [1.0] * 4)
    assert edges.hold_offered().buffer.tensor.tolist() == [4.0] * 4
    offered.buffer.drop()
    published(edges, pool, 5.0)
    published(edges, pool, 6.0)
    assert len(pool.buffers) == 3, "the one that was held is used again"


def test_what_a_lost_rank_has_borrowed_is_taken_back():
    """A dead reader gives nothing back; its buffer is free again."""
    edges, pool = WindowEdges({}), BufferPool(None, (4,), torch.float32)
    published(edges, pool, 1.0)
    buffer = edges.lent[2, 0] = edges.hold_offered().buffer
    edges.lent[3, 0] = edges.hold_offered().buffer
    edges.take_back({2}.__contains__)
    assert list(edges.lent) == [(3, 0)]
    assert buffer.holds == 2  # of rank 3, and as what is offered
