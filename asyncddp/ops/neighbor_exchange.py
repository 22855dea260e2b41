"""Exchange of tensors with neighbours, optionally compressed, without averaging them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.device.stream_registry import stream_ordering_of
from asyncddp.engine import OperationExchanges, OperationSpec, Steps
from asyncddp.errors import NonFiniteError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.encoded_exchange import encoded_signature
from asyncddp.ops.group_exchange import exchange_tensors
from asyncddp.ops.validation import signature_of
from asyncddp.ops.variants import blocking, nonblocking
from asyncddp.tensors.byte_views import dense


class ExchangedTensors(NamedTuple):
    """Tensors of one exchange with neighbours: the sent tensor, and those received, by rank."""

    rank: int
    sent: torch.Tensor
    received: Mapping[int, torch.Tensor]


@blocking
def exchange_with_neighbors(
    tensor: torch.Tensor,
    row: WeightRow,
    codec: TensorCompressor | None,
    *,
    name: str,
    describe: Callable[[], str] = str,
    to_each: Mapping[int, torch.Tensor] | None = None,
) -> OperationSpec[ExchangedTensors]:
    """Send a tensor to neighbours, encoded if there is a codec; return the tensors received.

    ``describe`` returns a description of the tensor's values, for the error of a tensor that is not
    finite. If neighbours get different tensors, ``to_each`` holds them by rank; they have the form
    of ``tensor``. A silent rank encodes nothing, and its ``sent`` is undefined.
    """
    verb = "exchange_with_neighbors"

    def steps(op: OperationExchanges) -> Steps[ExchangedTensors]:
        op.tolerates_loss = True
        if codec is None:
            sent, title = dense(tensor), verb
        else:
            title = f"{verb}(compression={codec.compressor!r})"
            if not is_finite(tensor):  # before the compressor remembers anything
                op.exchange(signature_of(title, tensor), row.sources, row.targets)
                raise NonFiniteError(f"rank {op.rank}: {describe()}")
            chunks = dense(tensor).reshape(-1, tensor.shape[-1])
            sent = codec.unwritten(chunks) if row.is_silent else codec.encode(chunks)
        form = encoded_signature(title, tensor, sent)
        parts = dict.fromkeys(row.targets, sent)
        if to_each is not None:
            parts = {target: dense(to_each[target]) for target in row.targets}
        received = yield from exchange_tensors(op, form, row.sources, parts, sent)
        return ExchangedTensors(op.rank, sent, received)

    order = stream_ordering_of(tensor)
    return OperationSpec(verb, steps, name, stream_ordering=order, begun=True)


exchange_with_neighbors_nonblocking = nonblocking(exchange_with_neighbors)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no element is NaN or infinite."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
