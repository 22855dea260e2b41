"""Base class of Lightning's strategies for Trainer and Fabric: ranks, devices and collectives."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, ClassVar

import torch

from asyncddp.algorithms import ALGORITHMS, Algorithm
from asyncddp.algorithms.wrapper_setup import checked_choice
from asyncddp.checkpoint.folder import POLICIES
from asyncddp.context import current, init
from asyncddp.environments.launchers import TorchEnvironment
from asyncddp.errors import ArgumentError
from asyncddp.integrations.lightning.collectives import gather_stacked
from asyncddp.ops.object_collectives import broadcast_object
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from asyncddp.optim.method_settings import MethodSettings


class WorldEnvironment:
    """Lightning ``ClusterEnvironment`` that reads ranks from asyncddp's running world.

    Each package registers it as a virtual subclass of its own abstract class.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """True: a launcher has started the ranks."""
        return True

    @property
    def main_address(self) -> str:
        """Address at which process groups of torch meet."""
        return TorchEnvironment().master or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Port at which process groups of torch meet."""
        return TorchEnvironment().port

    @staticmethod
    def detect() -> bool:
        """Return False: the environment is only chosen by the strategy."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return current().size

    def global_rank(self) -> int:
        """Return this rank."""
        return current().rank

    def local_rank(self) -> int:
        """Return this rank's number on its machine."""
        return current().local_rank

    def node_rank(self) -> int:
        """Return the number of this rank's machine."""
        return current().machine_rank

    def set_world_size(self, size: int) -> None:
        """Ignore the size that the Trainer computes from ``devices``."""

    def set_global_rank(self, rank: int) -> None:
        """Ignore the rank that the Trainer computes from ``devices``."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Do nothing: the strategy checks the flags against the world."""

    def teardown(self) -> None:
        """Do nothing: the world ends with the script."""


_StrategyOfLightning: Any = object


class WorldStrategyMixin(_StrategyOfLightning):  # type: ignore[misc]  # of whichever package
    """Base class of Lightning strategies whose ranks are those of asyncddp's own world."""

    strategy_name: ClassVar[str] = "asyncddp"
    _caller: ClassVar[str]
    """Lightning's class that has the flags: Trainer or Fabric."""
    _layer_sync: Any = None
    _num_nodes = 1  # as Lightning has been told
    _replica_mesh: Any = None
    """The mesh's dimension that averages, where replicas are sharded."""

    def _join_world(
        self,
        algorithm: str | type[Algorithm],
        topology: Any,
        replicas: str,
        process_group_backend: str | None,
        arguments: dict[str, Any],
        **of_lightning: Any,
    ) -> None:
        """Check the arguments, join the world, and initialise Lightning's strategy."""
        replicas = "all" if replicas == "per_rank" else replicas  # its name of old
        checked_choice("AsyncDDPStrategy: argument replicas", replicas, POLICIES)
        self._settings = MethodSettings.of(algorithm, arguments)
        self._settings.compressor_for(self._settings.create_method())
        self._topology, self._replicas = topology, replicas
        init()
        from lightning_utilities.core.rank_zero import rank_zero_only

        rank_zero_only.rank = current().rank  # which rank prints, in both packages
        super().__init__(**of_lightning)
        self._process_group_backend = process_group_backend
        self.cluster_environment = WorldEnvironment()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``asyncddp``, and ``asyncddp_NAME`` for each method, with Lightning."""
        name = cls.strategy_name
        strategy_registry.register(name, cls, "neighbour averaging of asyncddp", override=True)
        for method in ALGORITHMS:
            strategy_registry.register(
                f"{name}_{method}", cls, f"asyncddp's {method}", override=True, algorithm=method
            )

    # ranks and devices

    @property
    def is_distributed(self) -> bool:
        """True if there is more than one rank, so that data are sharded."""
        return current().size > 1

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return current().machine_size

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._num_nodes = number

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of distributed samplers: the number of ranks, and this rank."""
        return {"num_replicas": current().size, "rank": current().rank}

    @property
    def root_device(self) -> torch.device:
        """Device of this rank; each rank of a machine has its own if there are enough."""
        devices = self._devices()
        if not devices:
            return torch.device("cpu")
        local = current().local_rank
        if len(devices) == 1 and devices[0].type == "cuda" and current().local_size > 1:
            return torch.device("cuda", local % torch.cuda.device_count())
        return devices[local % len(devices)]

    def _devices(self) -> list[torch.device]:
        return list(getattr(self, "parallel_devices", None) or [])

    def _configure_launcher(self) -> None:
        """Check Lightning's flags against the world, at the end of the Trainer's constructor."""
        context, devices = current(), self._devices()
        every_gpu = bool(devices) and devices[0].type == "cuda"
        every_gpu = every_gpu and len(devices) == torch.cuda.device_count()
        if len(devices) not in (0, 1, context.local_size) and not every_gpu:
            raise ArgumentError(
                f"{self._caller}: argument devices: got {len(devices)} on a machine with "
                f"{context.local_size} of the world's {context.size} ranks; leave devices out, or "
                f"start {len(devices)} ranks: asyncddp run -np {len(devices)} SCRIPT"
            )
        if self._num_nodes not in (1, context.machine_size):
            raise ArgumentError(
                f"{self._caller}: argument num_nodes: got {self._num_nodes}, but the world's ranks "
                f"are on {context.machine_size}; leave num_nodes out"
            )
        if self._layer_sync is not None:
            self._check_layer_sync()

    def _check_layer_sync(self) -> None:
        """Raise an ArgumentError if torch's synchronised batch normalisation cannot work."""
        flag = f"{self._caller}: argument sync_batchnorm:"
        if self.root_device.type == "cpu":
            raise ArgumentError(
                f"{flag} torch's layers work on GPUs alone; on CPUs convert the model by "
                "the SyncBatchNorm of asyncddp.integrations.bagua.torch_api.contrib instead"
            )
        if self._process_group_backend is None:
            raise ArgumentError(
                f"{flag} torch's layers need torch.distributed, which is not in use; give "
                "AsyncDDPStrategy(process_group_backend='nccl')"
            )

    def setup_environment(self) -> None:
        """Set the device, and initialise ``torch.distributed`` if requested."""
        super().setup_environment()
        backend = self._process_group_backend
        if backend is None or torch.distributed.is_initialized():
            return
        context = current()
        if context.rank == 0 and context.size > 1:
            warnings.warn(
                "AsyncDDPStrategy: with process_group_backend Lightning broadcasts from rank 0 "
                "before each batch, so that all ranks go at the pace of the slowest; leave it out "
                "unless torchmetrics or SyncBatchNorm need it",
                stacklevel=2,
            )
        self._initialize_process_group(backend)

    @staticmethod
    def _initialize_process_group(backend: str, timeout: timedelta | None = None) -> None:
        """Initialise ``torch.distributed`` on the ranks of the world."""
        context = current()
        alone = context.size == 1
        store = torch.distributed.HashStore() if alone else None  # type: ignore[attr-defined]
        # registers the backend asyncddp, and lets ranks of MPI meet without MASTER_ADDR
        import asyncddp.integrations.torch_distributed  # noqa: F401

        torch.distributed.init_process_group(
            backend,
            timeout=timeout,
            store=store,
            rank=context.rank,
            world_size=context.size,
        )

    # collectives

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast the Python object of rank ``src``."""
        return broadcast_object(obj, src)

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Gather tensors of all ranks along a new first dimension."""
        return gather_stacked(tensor, group, sync_grads=sync_grads)

    # optimizers

    def _wrapped(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | list[torch.nn.Module]
    ) -> DistributedOptimizer:
        """Wrap an optimizer so that it trains by the strategy's method."""
        arguments = {**self._settings.arguments(), "topology": self._topology}
        mesh = self._replica_mesh
        return DistributedOptimizer(optimizer, model, **arguments, broadcast=False, mesh=mesh)


def check_shares_nothing(given: str, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise an ArgumentError if two optimizers share a parameter: each would average it."""
    owners: dict[int, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            other = owners.setdefault(id(parameter), optimizer)
            if other is not optimizer:
                raise ArgumentError(
                    f"AsyncDDPStrategy: {given} two optimizers of one parameter of shape "
                    f"{tuple(parameter.shape)}: {type(getattr(other, 'wrapped', other)).__name__} "
                    f"and {type(optimizer).__name__}. Each would average it; give each optimizer "
                    "parameters of its own, or call close() on the former before"
                )
