"""``bagua_init`` and ``ModelSwitchWrapper`` of Bagua's old API: switch algorithms in training."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import Self

from asyncddp.errors import ArgumentError
from asyncddp.integrations.bagua.torch_api.distributed_define import (
    BucketType,
    Compressor,
    DistributedAlgorithm,
)
from asyncddp.integrations.bagua.torch_api.distributed_module import (
    Allreducer,
    DecentralizedReducer,
    DistributedModule,
    ScatterGatherAllreducer,
)
from asyncddp.integrations.bagua.torch_api.env import (
    get_autotune_level,
    is_report_metrics_switch_on,
)
from asyncddp.integrations.bagua.torch_api.model_state import (
    average_state,
    broadcast_state,
    communicated_state,
)
from asyncddp.integrations.bagua.torch_api.overlapping_wrapper import OverlappingWrapper
from asyncddp.integrations.bagua.torch_api.process_group import default_group
from asyncddp.parallel.module_wrapper import TransparentModuleWrapper
from asyncddp.registry import nearest

__all__ = [
    "ModelSwitchWrapper",
    "allreduce_parameters",
    "bagua_init",
    "broadcast_parameters",
]

logger = logging.getLogger("asyncddp")

_REPORT_INTERVAL = 100  # training iterations
_REDUCER_OPTIONS = ("align_bytes", "fusion", "priority", "buckets")
_PEER_OPTIONS = ("peer_selection_mode", "communication_interval")
_OPTIONS = ("reduce_op", "compressor")
_EVERY_OPTION = (*_OPTIONS, *_PEER_OPTIONS, *_REDUCER_OPTIONS)
_MODULES: dict[DistributedAlgorithm, Callable[..., DistributedModule]] = {
    DistributedAlgorithm.GradientAllReduce: Allreducer,
    DistributedAlgorithm.ScatterGatherAllReduce: ScatterGatherAllreducer,
    DistributedAlgorithm.Decentralize: DecentralizedReducer,
    DistributedAlgorithm.QuantizeAllReduce: ScatterGatherAllreducer,
}


def broadcast_parameters(module: torch.nn.Module, broadcast_buffers: bool = True) -> None:
    """Broadcast the first rank's parameters, and optionally buffers; collective."""
    context = default_group().require_member("broadcast_parameters")
    broadcast_state(context, communicated_state(module, buffers=broadcast_buffers))


def allreduce_parameters(module: torch.nn.Module) -> None:
    """Replace parameters and buffers by their averages over ranks; collective.

    Integers are set to those of the first rank.
    """
    context = default_group().require_member("allreduce_parameters")
    average_state(context, communicated_state(module))


class ModelSwitchWrapper(TransparentModuleWrapper):
    """Wrapper of a model whose algorithm can be switched between two iterations.

    The optimizers are unchanged: gradients, or weights, are reduced in the backward pass.
    ``state_dict()`` and names are the model's own.

    Args:
        module: The model; also by the name ``model``.
        optimizer: Its optimizer, or a list of them.
        broadcast_buffers: Whether the first stage begins with the first rank's buffers, beside its
            parameters.
        delay_reduce: Whether to communicate at the end of the backward pass, not during it.
        hierarchical_reduce: Whether one rank of each node communicates with other nodes; None for
            all algorithms but ``GradientAllReduce``.
        message_size: Bytes at which a bucket is closed.
        intra_comm_root_rank: 0: the first rank of a node communicates with other nodes.
        **kwargs: Options of the algorithms, ``reduce_op``, ``compressor``, ``peer_selection_mode``
            and ``communication_interval``, and of the reducer, ``align_bytes`` and ``fusion``.

    Attributes:
        stage: Number of algorithms used so far.
        bagua_module: The module that runs in forward passes.

    Raises:
        ProcessGroupError: ``init_process_group`` was not called.
        ArgumentError: An invalid argument.

    Example:
        >>> import asyncddp as bf
        >>> import asyncddp.integrations.bagua.torch_api as bagua
        >>> def train():
        ...     bagua.init_process_group()
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, bagua.get_rank())
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     wrapper = ModelSwitchWrapper(model, optimizer).switch_to("allreduce")
        ...     wrapper(torch.full((1, 1), float(bagua.get_rank()))).sum().backward()
        ...     optimizer.step()
        ...     return wrapper.switch_to("decentralize").stage, model.weight.item()
        >>> with bf.local_world(3) as world:
        ...     world.run(train)
        [(2, -1.0), (2, -1.0), (2, -1.0)]
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        broadcast_buffers: bool = True,
        delay_reduce: bool = False,
        hierarchical_reduce: bool | None = None,
        message_size: int = 10_000_000,
        intra_comm_root_rank: int = 0,
        *,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        wrapped = module if model is None else model
        if not isinstance(wrapped, torch.nn.Module):
            raise ArgumentError(
                "ModelSwitchWrapper: argument module: expected a torch.nn.Module, got "
                f"{type(wrapped).__name__}"
            )
        if intra_comm_root_rank != 0:
            raise ArgumentError(
                "ModelSwitchWrapper: argument intra_comm_root_rank: the first rank of each node "
                f"communicates with other nodes; expected 0, got {intra_comm_root_rank}"
            )
        for name in kwargs:
            if name not in _EVERY_OPTION:
                raise ArgumentError(
                    f"bagua_init: argument {name}: there is no such option; known are: "
                    f"{', '.join(_EVERY_OPTION)}.{nearest(name, _EVERY_OPTION)}"
                )
        default_group()
        super().__init__(wrapped)
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer = [optimizer]
        self.optimizers = list(optimizer)
        self.broadcast_buffers, self.delay_reduce = broadcast_buffers, delay_reduce
        self.hierarchical_reduce, self.message_size = hierarchical_reduce, message_size
        self.intra_comm_root_rank, self.kwargs = intra_comm_root_rank, kwargs
        self.stage = self.step_counter = 0
        self._speeds: list[float] = []
        self._last_report = time.monotonic()
        self._set_module(wrapped)

    def _set_module(self, module: torch.nn.Module) -> None:
        object.__setattr__(self, "bagua_module", module)  # not as a submodule of the model

    bagua_module: torch.nn.Module

    def switch_to(self, distributed_algorithm: DistributedAlgorithm | str) -> Self:
        """Train with an algorithm from the next iteration on, and return the wrapper; collective.

        Operations in progress are finished. In the first stage parameters are set to the first
        rank's; later parameters and buffers become averages, and integers those of the first rank.
        Optimizer states are kept.

        Args:
            distributed_algorithm: The algorithm, or its value.

        Raises:
            UnknownNameError: There is no such algorithm.
        """
        algorithm = DistributedAlgorithm.from_str(distributed_algorithm)
        if isinstance(self.bagua_module, OverlappingWrapper):
            self.bagua_module.detach()
        if self.stage == 0:
            broadcast_parameters(self.module, self.broadcast_buffers)
        else:
            allreduce_parameters(self.module)
        self.stage += 1
        self._set_module(self._distributed(algorithm))
        return self

    def _distributed(self, algorithm: DistributedAlgorithm) -> OverlappingWrapper:
        kind = _MODULES[algorithm]
        decentralized = kind is DecentralizedReducer
        known = (*_OPTIONS, *_PEER_OPTIONS) if decentralized else _OPTIONS
        options = {name: self.kwargs[name] for name in known if name in self.kwargs}
        others = {name: self.kwargs[name] for name in _REDUCER_OPTIONS if name in self.kwargs}
        if algorithm is DistributedAlgorithm.QuantizeAllReduce:
            options["compressor"] = Compressor.Uint8Compressor
        hierarchical = self.hierarchical_reduce
        if hierarchical is None:
            hierarchical = algorithm is not DistributedAlgorithm.GradientAllReduce
        return OverlappingWrapper(
            kind(self.module, **options),
            self.optimizers,
            delay_reduce=self.delay_reduce,
            bucket_type=BucketType.Weight if decentralized else BucketType.Gradient,
            hierarchical_reduce=hierarchical,
            decentralize_reduce=decentralized,
            chunking=kind is ScatterGatherAllreducer,
            message_size=self.message_size,
            **others,
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; in training, count an iteration and optionally report speed.

        ``BAGUA_AUTOTUNE=1`` or ``BAGUA_REPORT_METRICS=1`` turns reports on, every 100 iterations.
        """
        result = self.bagua_module(*inputs, **kwargs)
        if self.module.training:
            if self.step_counter and self.step_counter % _REPORT_INTERVAL == 0:
                self._measure()
            self.step_counter += 1
        return result

    def _measure(self) -> None:
        now = time.monotonic()
        self._speeds.append(_REPORT_INTERVAL / (now - self._last_report))
        self._last_report = now
        if get_autotune_level() >= 1 or is_report_metrics_switch_on():
            self.report_metrics(self._speeds)
            if self.ask_and_update_hyperparameters():
                self._speeds.clear()

    def report_metrics(self, score_record_list: Sequence[float]) -> None:
        """Log speeds in iterations per second: the newest, and the median of all."""
        if score_record_list:
            logger.info(
                "training iteration %d: %.1f iterations/s, median %.1f",
                self.step_counter,
                score_record_list[-1],
                statistics.median(score_record_list),
            )

    def ask_and_update_hyperparameters(self) -> bool:
        """Return False: there is no service process that would propose other buckets.

        ``bagua_module.reset_reducer(...)`` sets other buckets.
        """
        return False


def bagua_init(
    module: torch.nn.Module,
    optimizer: Any,
    distributed_algorithm: DistributedAlgorithm | str = DistributedAlgorithm.GradientAllReduce,
    broadcast_buffers: bool = True,
    delay_reduce: bool = False,
    hierarchical_reduce: bool | None = None,
    message_size: int = 10_000_000,
    **kwargs: Any,
) -> tuple[ModelSwitchWrapper, Any]:
    """Wrap a model so that an algorithm trains it; return wrapper and optimizer; collective.

    The arguments are those of :class:`ModelSwitchWrapper`; ``distributed_algorithm`` is the first
    one.

    Returns:
        The wrapper, and the optimizer or optimizers as they were given.
    """
    wrapper = ModelSwitchWrapper(
        module,
        optimizer,
        broadcast_buffers=broadcast_buffers,
        delay_reduce=delay_reduce,
        hierarchical_reduce=hierarchical_reduce,
        message_size=message_size,
        **kwargs,
    )
    return wrapper.switch_to(distributed_algorithm), optimizer
