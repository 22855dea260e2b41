"""Which wire carries tensors on the GPUs of this world, where the user has asked for others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.context.context import Context
from asyncddp.errors import AsyncDDPError
from asyncddp.memory.streams import streams_of_device
from asyncddp.transport.device_agreement import agree, own_facts, wires_of
from asyncddp.transport.device_routes import device_index

__all__ = ["settle_device_wires"]


def settle_device_wires(context: Context) -> None:
    """Have all ranks agree on a wire, if ``ASYNCDDP_DEVICE_WIRES`` is set; collective.

    Args:
        context: The world, of which nothing has been asked yet.

    Raises:
        UnknownNameError: There is no wire of that name.
        MismatchError: Some ranks see GPUs and others see none.
    """
    config = context.config
    if config.device_wires is None:
        return
    try:
        _settle(context, wires_of(config.device_wires))
    except AsyncDDPError:
        context.close("it did not agree on a wire for tensors on GPUs")
        raise


def _settle(context: Context, wanted: Sequence[str]) -> None:
    mine = own_facts(context.rank, context.machine_rank, context.local_rank)
    index = device_index(context.local_rank, torch.cuda.device_count())
    streams = None if index is None else streams_of_device(torch.device("cuda", index))
    context.device_choice = agree(context.transport, wanted, mine, streams, context.config.timeout)
