"""``neighbor_allreduce_hook``: averages gradients with the neighbours in a graph or schedule."""

from typing import ClassVar

import torch
from torch._C._distributed_c10d import GradBucket
from typing_extensions import override

from asyncddp import topology as graphs
from asyncddp.algorithms.compression_rules import with_error_feedback
from asyncddp.compression import Compressor, compressor_for
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.engine import Steps
from asyncddp.hooks.bucket_codecs import BucketCodecs
from asyncddp.hooks.gradient_state import GradientHookState
from asyncddp.hooks.neighbor_average import (
    average_with_neighbors,
    check_size,
    fingerprint,
    row_of,
)
from asyncddp.hooks.process_group_exchanges import ProcessGroupExchanges
from asyncddp.hooks.registration import require_bucket
from asyncddp.ops.encoded_exchange import average_encoded
from asyncddp.tensors.dtypes import DTYPES

_HOOK = "neighbor_allreduce_hook"


class NeighborAllreduceState(GradientHookState):
    r"""State object of :func:`neighbor_allreduce_hook`: its process group and topology.

    Args:
        module: The DistributedDataParallel on which the hook is to be registered.
        topology: A graph or schedule on the ranks of its process group; its round is the number
            of earlier backward passes that communicated.
        compression: A compressor of ``asyncddp.compression``, or its name; None sends gradients
            uncompressed.
        error_feedback: Whether to repay what compression leaves out; None means if it is needed.

    Raises:
        TopologyError: The graph is none, or for another number of ranks.
        ArgumentError: An argument is wrong, as for :class:`HookState`.
        MismatchError: The settings of two ranks differ, or another rank found a mistake.
    """

    replicas_differ: ClassVar[bool] = True

    def __init__(
        self,
        module: torch.nn.Module,
        topology: graphs.GraphOrSchedule,
        *,
        compression: str | Compressor | None = None,
        error_feedback: bool | None = None,
    ) -> None:
        def prepare() -> None:
            self.schedule = graphs.as_schedule(topology)
            if compression is not None:
                compressor = compressor_for(type(self).__name__, compression)
                self.codecs = BucketCodecs(with_error_feedback(compressor, error_feedback))

        self.codecs: BucketCodecs | None = None
        super().__init__(module, prepare)

    @override
    def _settings(self) -> str:
        compressor = self.codecs and self.codecs.compressor
        return f"{fingerprint(self.schedule)}, compression={compressor!r}"

    @override
    def _check(self, size: int) -> None:
        check_size(type(self).__name__, self.schedule, size)

    @override
    def _average(
        self,
        operation: ProcessGroupExchanges,
        gradients: torch.Tensor,
        codec: TensorCompressor | None,
    ) -> Steps[torch.Tensor]:
        row = row_of(self.schedule, operation.rank, self.step)
        if codec is None:
            return average_with_neighbors(operation, gradients, row)
        wide = DTYPES[gradients.dtype].accumulate
        return average_encoded(operation, gradients, row, wide, codec)


def neighbor_allreduce_hook(
    state: NeighborAllreduceState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    r"""Average gradients with the neighbours in a graph, instead of with all ranks.

    .. math:: \hat g_i = \sum_j w_{ij} g_j

    Each rank sends one message of a bucket's size to each neighbour during the backward pass. The
    replicas differ from the first step on, and since only gradients are averaged, nothing but the
    data brings them together again. To keep parameters close to each other, use
    :func:`gossip_parameters_hook`, or average parameters now and then with torch's
    ``PeriodicModelAverager``. On a complete graph the hook equals ``allreduce_hook``.

    Example::

        ddp = DistributedDataParallel(model)
        state = hooks.NeighborAllreduceState(ddp, topology.ring(4))
        ddp.register_comm_hook(state, hooks.neighbor_allreduce_hook)

    Raises:
        ArgumentError: It was registered with another state, or not on DistributedDataParallel.
        PeerError: A neighbour has left, or did not answer by the timeout of the process group.
    """
    require_bucket(_HOOK, state, NeighborAllreduceState, bucket)
    return state.average(_HOOK, bucket)
