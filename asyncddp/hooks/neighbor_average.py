"""Average of a tensor with the neighbours of one schedule round, over a torch process group."""

from __future__ import annotations

import zlib

import torch

from asyncddp.engine import Steps
from asyncddp.hooks.process_group_exchanges import ProcessGroupExchanges
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.group_exchange import exchange_tensors
from asyncddp.ops.validation import signature_of
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.topology import Schedule, TopologyError

_ROUNDS = 4  # of which the fingerprint of a schedule tells


def row_of(schedule: Schedule, rank: int, step: int) -> WeightRow:
    """Return a rank's weights in one round of a schedule."""
    near = schedule.neighbors(rank, step)
    return WeightRow(near.self_weight, near.src_weights, dict.fromkeys(near.dst_ranks, 1.0))


def average_with_neighbors(
    op: ProcessGroupExchanges, tensor: torch.Tensor, row: WeightRow
) -> Steps[torch.Tensor]:
    r"""Average a tensor with neighbours in place: :math:`x_i \leftarrow \sum_j w_{ij} x_j`."""
    parts = dict.fromkeys(row.targets, tensor)
    form = signature_of(op.verb, tensor)
    received = yield from exchange_tensors(op, form, row.sources, parts, tensor)
    others = [received[source] for source in row.sources]
    row.weighted_sum_in(DTYPES[tensor.dtype].accumulate, tensor, others, tensor)
    return tensor


def check_size(caller: str, schedule: Schedule, size: int) -> None:
    """Raise a TopologyError unless a schedule is for ``size`` ranks."""
    if schedule.n != size:
        raise TopologyError(
            f"{caller}: argument topology: {schedule.name} is for {schedule.n} ranks, but the "
            f"module's process group has {size}; build it with n={size}"
        )


def fingerprint(schedule: Schedule) -> str:
    """Return a text that identifies a schedule by its name and the weights of its first rounds."""
    rounds = range(min(schedule.period or _ROUNDS, _ROUNDS))
    rows = [schedule.neighbors(rank, k) for rank in range(schedule.n) for k in rounds]
    return f"topology={schedule.name}, weights {zlib.crc32(repr(rows).encode()):08x}"
