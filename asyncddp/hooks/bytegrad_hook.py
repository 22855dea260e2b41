"""``bytegrad_hook``: averages gradients, quantised to 8 bits for transfer."""

import torch
from torch._C._distributed_c10d import GradBucket

from asyncddp.algorithms.methods.bytegrad import ByteGrad
from asyncddp.hooks.compressed_allreduce_hook import CompressedAllreduceState
from asyncddp.hooks.registration import require_bucket

_HOOK = "bytegrad_hook"


class ByteGradState(CompressedAllreduceState):
    """State object of :func:`bytegrad_hook`: holds its settings, and nothing from earlier steps.

    Args:
        module: The DistributedDataParallel on which the hook is to be registered.

    Raises:
        ArgumentError: The argument is wrong, as for :class:`HookState`.
        MismatchError: Another rank found a mistake.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, ByteGrad.default_compression, error_feedback=False)


def bytegrad_hook(state: ByteGradState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over all ranks, quantised to 8 bits for transfer, without error feedback.

    The method is :class:`asyncddp.algorithms.methods.bytegrad.ByteGrad`; replicas stay equal.

    Example::

        ddp.register_comm_hook(hooks.ByteGradState(ddp), hooks.bytegrad_hook)

    Raises:
        ArgumentError: It was registered with another state, or not on DistributedDataParallel.
        PeerError: A rank has left, or did not answer by the timeout of the process group.
    """
    require_bucket(_HOOK, state, ByteGradState, bucket)
    return state.average(_HOOK, bucket)
