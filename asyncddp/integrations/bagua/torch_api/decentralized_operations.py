"""Bucket operations that average with peers: all ranks, one peer, or both ring neighbours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from asyncddp.compression import Compressor
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.context import Context
from asyncddp.engine import Handle
from asyncddp.errors import ArgumentError
from asyncddp.integrations.bagua.torch_api.bucket_operations import (
    BucketOperation,
    Finish,
    OperatedBucket,
    among,
    compressor_by_name,
)
from asyncddp.integrations.bagua.torch_api.process_group import BaguaProcessGroup
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.allreduce import allreduce_nonblocking, local_allreduce_
from asyncddp.ops.hierarchical_allreduce import hierarchical_allreduce_nonblocking
from asyncddp.ops.hierarchical_neighbor_allreduce import average_by_machine_row_nonblocking
from asyncddp.ops.neighbor_allreduce import average_by_row_nonblocking
from asyncddp.ops.neighbor_exchange import exchange_with_neighbors_nonblocking
from asyncddp.tensors.allocation import detached_copy
from asyncddp.topology import shift_one

_LOW_PRECISION = "append_low_precision_decentralized_synchronous_op"


class DecentralizedOperation:
    """Average with all ranks or one peer; see ``BaguaBucket.append_decentralized_synchronous_op``.

    Attributes:
        peer_weight: Flat tensor that gets the average.
        step: Number of averages so far; it determines the next peer.
    """

    def __init__(
        self,
        group: BaguaProcessGroup | None,
        peer_weight: torch.Tensor,
        *,
        mode: str,
        hierarchical: bool,
    ) -> None:
        if mode not in ("all", "shift_one"):
            raise ArgumentError(
                "append_decentralized_synchronous_op: argument peer_selection_mode: expected 'all' "
                f"or 'shift_one', got {mode!r}"
            )
        self.peer_weight, self.step = peer_weight, 0
        self._mode, self._hierarchical = mode, hierarchical
        self._start_among = among(group, self._start)

    def __call__(self, bucket: OperatedBucket) -> Finish | None:
        """Start averaging a bucket."""
        return self._start_among(bucket)

    def _start(self, context: Context, bucket: OperatedBucket) -> Finish:
        flat, out = bucket.gather(), self.peer_weight.detach().view(-1)
        if out.numel() != flat.numel():
            raise ArgumentError(
                "append_decentralized_synchronous_op: argument peer_weight: expected as many "
                f"elements as bucket {bucket.name!r} has, {flat.numel()}, got {out.numel()}; make "
                "it by bucket.flattened_tensor()"
            )
        handle = self._verb(context)(flat, name=bucket.label, out=out)
        self.step += 1
        return partial(_wait, handle)

    def _verb(self, context: Context) -> Callable[..., Handle[torch.Tensor]]:
        if self._mode == "all":
            return (
                hierarchical_allreduce_nonblocking if self._hierarchical else allreduce_nonblocking
            )
        place, count = context.rank, context.size
        if self._hierarchical:
            place, count = context.machine_rank, context.machine_size
        near = shift_one(count).neighbors(place, self.step)
        row = WeightRow(near.self_weight, near.src_weights, dict.fromkeys(near.dst_ranks, 1.0))
        by_row = average_by_row_nonblocking
        if self._hierarchical:
            by_row = average_by_machine_row_nonblocking
        return partial(by_row, row=row)

    def copy_back_peer_weight(self, bucket: OperatedBucket) -> None:
        """Copy the average into the bucket's tensors."""
        flat = bucket.gather()
        with torch.no_grad():
            flat.copy_(self.peer_weight.view(-1))
        bucket.scatter(flat)


def _wait(handle: Handle[torch.Tensor]) -> None:
    handle.wait()


def compressed_differences(
    group: BaguaProcessGroup | None,
    copies: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    hierarchical: bool,
    compression: str | Compressor,
) -> BucketOperation:
    r"""Make an operation that exchanges compressed differences with the ring neighbours.

    .. math:: q = Q\Big(\tfrac13 (w + l + r) - w + (x - w)\Big), \qquad w \leftarrow w + q, \quad
              l \leftarrow l + q_l, \quad r \leftarrow r + q_r, \quad x \leftarrow w

    where w, l and r are the copies of this rank's, its left and its right neighbour's tensors. If
    the ring consists of nodes, each rank exchanges with the ranks of its own local rank, so that
    all ranks of a node compute the same.
    """
    compressor = compressor_by_name(_LOW_PRECISION, compression)
    if compressor is None:
        raise ArgumentError(f"{_LOW_PRECISION}: argument compression: expected a name, got None")
    codec = TensorCompressor(compressor)

    def start(context: Context, bucket: OperatedBucket) -> Finish:
        flat = bucket.gather()
        own, left, right = (copy.detach().view(-1) for copy in copies)
        if hierarchical:
            local_allreduce_(flat, name=bucket.label)
        before, after = _ring_neighbors(context, hierarchical=hierarchical)
        others = dict.fromkeys({before, after} - {context.rank}, 1.0)
        difference = detached_copy(flat).add_(left, alpha=1 / 3).add_(right, alpha=1 / 3)
        difference.add_(own, alpha=-5 / 3)
        handle = exchange_with_neighbors_nonblocking(
            difference, WeightRow(1.0, others, others), codec, name=f"{bucket.label}.differences"
        )

        def finish() -> None:
            exchanged = handle.wait()
            messages = {context.rank: exchanged.sent, **exchanged.received}
            with torch.no_grad():
                for rank, copy in ((context.rank, own), (before, left), (after, right)):
                    codec.decode_add(messages[rank], copy.view(1, -1), 1.0, copy.dtype)
                flat.copy_(own)
            bucket.scatter(flat)

        return finish

    return among(group, start)


def _ring_neighbors(context: Context, *, hierarchical: bool) -> tuple[int, int]:
    """Return the previous and the next rank on the ring of ranks, or of nodes."""
    if not hierarchical:
        return (context.rank - 1) % context.size, (context.rank + 1) % context.size
    machines = context.machines.members
    if not context.machines.homogeneous:
        raise ArgumentError(
            f"{_LOW_PRECISION}: argument hierarchical: expected nodes with equally many ranks, "
            f"got {[len(one) for one in machines]}; give False"
        )
    place, local = context.machine_rank, context.local_rank
    before = machines[(place - 1) % len(machines)][local]
    return before, machines[(place + 1) % len(machines)][local]
