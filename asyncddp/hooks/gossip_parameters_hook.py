"""``gossip_parameters_hook``: averages parameters with neighbours during the backward pass."""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from typing_extensions import override

from asyncddp import topology as graphs
from asyncddp.engine import Steps
from asyncddp.hooks.hook_state import HookState
from asyncddp.hooks.neighbor_average import (
    average_with_neighbors,
    check_size,
    fingerprint,
    row_of,
)
from asyncddp.hooks.process_group_exchanges import ProcessGroupExchanges
from asyncddp.hooks.registration import require_bucket

_HOOK = "gossip_parameters_hook"


class GossipParametersState(HookState):
    """State object of :func:`gossip_parameters_hook`: its process group, topology and averages.

    Args:
        module: The DistributedDataParallel on which the hook is to be registered.
        topology: A graph or schedule on the ranks of its process group; its round is the number
            of earlier backward passes that communicated.

    Raises:
        TopologyError: The graph is none, or for another number of ranks.
        ArgumentError: An argument is wrong, as for :class:`HookState`.
        MismatchError: The settings of two ranks differ, or another rank found a mistake.
    """

    replicas_differ: ClassVar[bool] = True

    def __init__(self, module: torch.nn.Module, topology: graphs.GraphOrSchedule) -> None:
        def prepare() -> None:
            self.schedule = graphs.as_schedule(topology)

        super().__init__(module, prepare)

    @override
    def _settings(self) -> str:
        return fingerprint(self.schedule)

    @override
    def _check(self, size: int) -> None:
        check_size(type(self).__name__, self.schedule, size)

    @override
    def _bind(self, module: torch.nn.Module, prepare: Callable[[], None]) -> None:
        super()._bind(module, prepare)
        self._averages: list[tuple[list[torch.Tensor], torch.Tensor]] = []

    def begin_average(self, bucket: GradBucket) -> None:
        """Begin averaging a bucket's parameters; after the last bucket all averages are written."""
        parameters = bucket.parameters()
        row = row_of(self.schedule, dist.get_rank(self.group), self.step)
        if bucket.index() == 0:
            self._averages.clear()

        def keep(mean: torch.Tensor) -> None:
            self._averages.append((parameters, mean))

        def steps(operation: ProcessGroupExchanges) -> Steps[torch.Tensor]:
            flat = torch.cat([one.detach().reshape(-1) for one in parameters])
            return average_with_neighbors(operation, flat, row)

        self._begin(_HOOK, bucket, steps, keep)
        if bucket.is_last():
            if torch._C._current_graph_task_id() == -1:  # a rank of Join that has no data left
                self._write()
            else:
                # until the pass ends, a parameter may be read by what is not part of its gradient
                torch.autograd.Variable._execution_engine.queue_callback(self._write)

    def _write(self) -> None:
        """Wait for the averages, and copy them into the parameters."""
        self._drain()
        self.step += 1
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        with torch.no_grad():
            for parameters, mean in self._averages:
                parts = torch.split(mean, [one.numel() for one in parameters])
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.copy_(part.view(parameter.shape))
        self._averages.clear()


def gossip_parameters_hook(
    state: GossipParametersState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    r"""Average parameters with the neighbours in a graph; gradients stay local to each rank.

    .. math:: x_i^{(k+1)} = \sum_j w_{ij} x_j^{(k)} - \gamma\, g_i(x_i^{(k)})

    Decentralised SGD inside DistributedDataParallel: as soon as a bucket's gradients are ready, its
    parameters are sent to the neighbours, while the backward pass continues. At its end the
    averages replace the parameters, and any optimizer steps from there. A step without
    communication, in ``no_sync()``, does not average parameters.

    The replicas differ, but stay near each other. Each rank has its own buffers, gradients and
    optimizer state. A rank whose GradScaler skips a step still averages parameters.

    Example::

        ddp = DistributedDataParallel(model)
        state = hooks.GossipParametersState(ddp, topology.one_peer_exponential(4))
        ddp.register_comm_hook(state, hooks.gossip_parameters_hook)

    Raises:
        ArgumentError: It was registered with another state, or not on DistributedDataParallel.
        PeerError: A neighbour has left, or did not answer by the timeout of the process group.

    References:
        Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NIPS 2017.
    """
    require_bucket(_HOOK, state, GossipParametersState, bucket)
    state.begin_average(bucket)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
