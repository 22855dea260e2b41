"""Transfer of a training state, as bytes, from one rank to one that joins."""

from __future__ import annotations

import torch

from asyncddp.context import current
from asyncddp.engine import Handle, OperationExchanges, OperationSpec, Steps
from asyncddp.ops.group_exchange import exchange_tensors
from asyncddp.ops.validation import expected_by, signature_of

_FORM = "state"


def send_state(data: torch.Tensor, peer: int, name: str) -> Handle[None]:
    """Start to send a flat uint8 tensor to a rank, which need not take part yet."""

    def steps(op: OperationExchanges) -> Steps[None]:
        yield from exchange_tensors(op, signature_of(_FORM, data), [], {peer: data}, data)

    return current().engine.submit(OperationSpec("send_state", steps, name))


def receive_state(peer: int, name: str) -> torch.Tensor:
    """Receive what a rank sends by :func:`send_state`."""
    form, into = expected_by(_FORM, None)

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        return (yield from exchange_tensors(op, form, [peer], {}, into, {}))[peer]

    return current().engine.run(OperationSpec("receive_state", steps, name))
