"""Operations by which the progress engine continues, or fails, what the fast path has begun."""

from __future__ import annotations

import torch

from asyncddp.engine import ChunkedExchange, OperationExchanges, OperationSpec, Steps
from asyncddp.engine.persistent_channels import PersistentChannel
from asyncddp.errors import PeerError


def resuming_operation(
    channel: PersistentChannel, exchange: ChunkedExchange, rest: Steps[torch.Tensor]
) -> OperationSpec[torch.Tensor]:
    """Build an operation that adopts an exchange and continues where it stands.

    Args:
        channel: The persistent channel of the exchange.
        exchange: The exchange.
        rest: What is left to do.
    """

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        """Adopt the exchange, and make the remaining steps."""
        op.adopt(exchange, channel.signature)
        return (yield from rest)

    return OperationSpec(channel.signature.verb, steps, channel.name)


def failing_operation(
    channel: PersistentChannel, exchange: ChunkedExchange, error: PeerError
) -> OperationSpec[torch.Tensor]:
    """Build an operation that adopts an exchange and fails, so that peers are told.

    Args:
        channel: The persistent channel of the exchange.
        exchange: The exchange.
        error: Why it fails.
    """

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        """Adopt the exchange, and raise the error."""
        op.adopt(exchange, channel.signature)
        yield from ()
        raise error

    return OperationSpec(channel.signature.verb, steps, channel.name)
