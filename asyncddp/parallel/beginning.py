"""How a wrapper begins: a name, a way to the neighbours, and the same model on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.ops.agreement import agree
from asyncddp.ops.broadcast import broadcast_nonblocking_
from asyncddp.parallel.asynchronous import Asynchronous
from asyncddp.parallel.blocks import Named
from asyncddp.parallel.exchange import Alone, Exchange
from asyncddp.parallel.synchronous import Synchronous
from topology import GraphOrSchedule

__all__ = ["broadcast", "exchange_for", "insist_alike", "label_in"]

_WHO = "DecentralizedDataParallel"


def label_in(context: Context) -> str:
    """A name for the next wrapper of a world, equal on all ranks that make them in one order."""
    number = context.attachments[_WHO] = context.attachments.get(_WHO, -1) + 1
    return f"{_WHO}{number}"


def exchange_for(
    context: Context, label: str, topology: GraphOrSchedule | None, *, sync: bool
) -> Exchange:
    """The way to the neighbours.

    Raises:
        TopologyError: The topology does not fit.
    """
    if context.size == 1:
        return Alone(context, label, topology)
    return (Synchronous if sync else Asynchronous)(context, label, topology)


def insist_alike(context: Context, settings: Sequence[str], named: Named) -> None:
    """Compare settings and parameters over the ranks; collective.

    Raises:
        MismatchError: On every rank, if any two differ.
    """
    facts = [
        f"parameter {name} of shape {tuple(one.shape)}, strides {one.stride()}, {one.dtype}"
        for name, one in named
    ]
    agree(context, f"{_WHO} needs the same model and settings on all ranks", [*settings, *facts])


def broadcast(context: Context, tensors: Iterable[torch.Tensor]) -> None:
    """Give all ranks the tensors of rank 0; collective."""
    if context.size > 1:
        with use(context):
            handles = [broadcast_nonblocking_(tensor.detach(), 0) for tensor in tensors]
        for handle in handles:
            handle.wait()
