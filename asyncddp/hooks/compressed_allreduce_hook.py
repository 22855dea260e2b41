"""``compressed_allreduce_hook``: averages gradients, compressed when sent and when returned."""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from typing_extensions import override

from asyncddp.algorithms.compression_rules import with_error_feedback
from asyncddp.compression import Compressor, ErrorFeedback, compressor_for
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.engine import Steps
from asyncddp.hooks.bucket_codecs import BucketCodecs
from asyncddp.hooks.gradient_state import GradientHookState
from asyncddp.hooks.process_group_exchanges import ProcessGroupExchanges
from asyncddp.hooks.registration import require_bucket
from asyncddp.ops.encoded_exchange import sum_encoded_over_group

_HOOK = "compressed_allreduce_hook"


class CompressedAllreduceState(GradientHookState):
    r"""State object of :func:`compressed_allreduce_hook`: its process group and compressors.

    Args:
        module: The DistributedDataParallel on which the hook is to be registered.
        compression: A compressor of ``asyncddp.compression``, with its options, or its name.
        error_feedback: Whether to repay what compression leaves out; None means if it is needed, as
            for ``sign``, ``top_k`` and ``power_sgd``. These cost accuracy with Adam, and ``sign``
            and ``top_k`` with momentum too, unless the step size is made smaller: rank 0's log says
            so, since the hook does not see the optimizer.

    Raises:
        UnknownNameError: No compressor has that name.
        ArgumentError: An argument is wrong, as for :class:`HookState`.
        MismatchError: The settings of two ranks differ, or another rank found a mistake.
    """

    codecs: BucketCodecs

    def __init__(
        self,
        module: torch.nn.Module,
        compression: str | Compressor,
        *,
        error_feedback: bool | None = None,
    ) -> None:
        def prepare() -> None:
            compressor = compressor_for(type(self).__name__, compression)
            self.codecs = BucketCodecs(with_error_feedback(compressor, error_feedback))

        super().__init__(module, prepare)

    @override
    def _settings(self) -> str:
        return repr(self.codecs.compressor)

    @override
    def _average(
        self,
        operation: ProcessGroupExchanges,
        gradients: torch.Tensor,
        codec: TensorCompressor | None,
    ) -> Steps[torch.Tensor]:
        size = dist.get_world_size(self.group)
        if size == 1:
            return _nothing_to_send(gradients)
        return sum_encoded_over_group(
            operation, range(size), gradients, codec, operation.verb, size
        )


def _nothing_to_send(tensor: torch.Tensor) -> Steps[torch.Tensor]:
    """Return the tensor unchanged, as the operation steps of an average over one rank."""
    yield from ()
    return tensor


def compressed_allreduce_hook(
    state: CompressedAllreduceState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    r"""Average gradients over all ranks, compressed for transfer by any compressor.

    .. math:: \hat g_c = Q_2\Big(\frac1n \sum_i Q_1(g_{i,c})\Big), \qquad c = 1, \dots, n

    Each bucket is cut into n parts; rank c averages part c of all ranks' encoded gradients, and
    sends the encoded average to all, so that all ranks decode the same bytes and replicas stay
    equal. With error feedback :math:`Q_1` and :math:`Q_2` have an error memory each. The error
    memories are reset after a step whose gradients overflowed, which a GradScaler skips, and when
    DDP has put other parameters into a bucket, as it does once, after the first backward pass.

    Example::

        ddp = DistributedDataParallel(model)
        state = hooks.CompressedAllreduceState(ddp, "qsgd_int8")
        ddp.register_comm_hook(state, hooks.compressed_allreduce_hook)

    Raises:
        ArgumentError: It was registered with another state, or not on DistributedDataParallel, or a
            bucket is too small for the compressor's options.
        PeerError: A rank has left, or did not answer by the timeout of the process group.
    """
    require_bucket(_HOOK, state, CompressedAllreduceState, bucket)
    return state.average(_HOOK, bucket)


def error_feedback(compression: str | Compressor) -> Compressor:
    """Add error feedback to a compressor, for any hook's state, even if the compressor needs none.

    Example:
        >>> error_feedback("fp16")
        ErrorFeedback(inner=FP16())

    Raises:
        UnknownNameError: No compressor has that name.
        ArgumentError: It is none.
    """
    compressor = compressor_for("error_feedback", compression)
    return compressor if isinstance(compressor, ErrorFeedback) else ErrorFeedback(compressor)
