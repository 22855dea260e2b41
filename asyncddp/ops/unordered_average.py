"""Average over all ranks, matched by name: ranks may call it in any order among other calls."""

from __future__ import annotations

import torch

from asyncddp.context import current
from asyncddp.device.stream_registry import stream_ordering_of
from asyncddp.engine import OperationExchanges, OperationSpec, Steps
from asyncddp.ops.encoded_exchange import Compression, bound_to, sum_encoded_over_group
from asyncddp.ops.validation import accumulation_dtype, write_result
from asyncddp.ops.variants import blocking, nonblocking

_VERB = "unordered_average"


@blocking
def unordered_average(
    tensor: torch.Tensor, *, name: str, compression: Compression = None
) -> OperationSpec[torch.Tensor]:
    r"""Average a tensor over all ranks; calls are matched by name, not by order.

    .. math:: y = \frac{1}{n} \sum_j x_j

    Calls are matched by name and by the number of earlier uses, as neighbour averages are; an
    allreduce must be called in the same order as all other collectives.
    """
    context = current()
    dtype = accumulation_dtype(_VERB, tensor, round_integers=False)

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        group, given = range(context.size), tensor
        if compression is None:
            given, codec = tensor.to(dtype), None
        else:
            codec = bound_to(op, compression)
        total = yield from sum_encoded_over_group(op, group, given, codec, _VERB, context.size)
        return write_result(total, tensor, None)

    return OperationSpec(_VERB, steps, name, stream_ordering=stream_ordering_of(tensor))


unordered_average_nonblocking = nonblocking(unordered_average)
