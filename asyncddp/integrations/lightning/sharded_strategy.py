"""Strategy mixin of the Trainer whose replicas are models in shards, for both packages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from asyncddp.algorithms import Algorithm
from asyncddp.algorithms.wrapper_setup import checked_choice
from asyncddp.checkpoint.load import load_checkpoint
from asyncddp.checkpoint.save import save_checkpoint
from asyncddp.context import current
from asyncddp.errors import ArgumentError
from asyncddp.integrations.lightning.trainer_strategy import VALIDATIONS, TrainerStrategyMixin

logger = logging.getLogger("asyncddp")

REPLICA, DATA, TENSOR = "replica", "data_parallel", "tensor_parallel"


class ShardedStrategyMixin(TrainerStrategyMixin):
    """Strategy of Lightning's Trainer that averages replicas of a model in shards by any method.

    Each replica is what Lightning's ``ModelParallelStrategy`` trains: ``configure_model`` shards
    the model over ``self.device_mesh["data_parallel"]``, ``["tensor_parallel"]``, or both. The
    mesh has one more dimension, ``"replica"``, along which each optimizer averages as
    ``bf.DistributedOptimizer(..., mesh=self.device_mesh["replica"])`` does. There are as many
    replicas as the ranks that a launcher has started allow. The data are divided among the
    data-parallel ranks of all replicas.

    A checkpoint is a folder of :func:`asyncddp.save_checkpoint`, which has the Trainer's own state
    as ``extra``; hyper-parameters must be what ``torch.load(weights_only=True)`` reads.

    Args:
        algorithm, communication, topology, compression: As of
            :class:`asyncddp.integrations.lightning.AsyncDDPStrategy`; topologies are of replicas.
        data_parallel_size: Ranks of a replica that have data of their own; ``"auto"`` makes each
            machine a replica.
        tensor_parallel_size: Ranks of a tensor-parallel group, which have the same data.
        replicas: Whose parts a checkpoint holds: ``"average"``, ``"rank0"`` for replica 0's, or
            ``"all"``, from which as many replicas go on exactly.
        validate: Model in validation, test and prediction: each replica's, ``"local"``, or the
            ``"average"``.
        process_group_backend: Backend of ``torch.distributed``; None takes nccl on GPUs, else gloo.
        timeout: How long its collectives wait.
        **options: Other arguments of :class:`asyncddp.DistributedOptimizer`, and options of the
            method.

    Raises:
        UnknownNameError: No method has the name.
        ArgumentError: An invalid argument, or the ranks are no whole number of replicas.
    """

    _device_mesh: Any

    def __init__(
        self,
        algorithm: str | type[Algorithm] = "adapt_then_combine",
        communication: str | None = None,
        topology: Any = None,
        compression: Any = None,
        *,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int = 1,
        replicas: str = "average",
        validate: str = "local",
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        checked_choice(f"{type(self).__name__}: argument validate", validate, VALIDATIONS)
        self._validate, self._timeout_of_groups = validate, timeout
        self._join_world(
            algorithm,
            topology,
            replicas,
            process_group_backend,
            {**options, "communication": communication, "compression": compression},
        )
        self._shape = _shape(type(self).__name__, data_parallel_size, tensor_parallel_size)

    @property
    def _replica_mesh(self) -> Any:
        return self.device_mesh[REPLICA]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of distributed samplers: tensor-parallel ranks have the same share."""
        place = self.device_mesh.get_local_rank
        replicas, parts, _ = self._shape
        return {"num_replicas": replicas * parts, "rank": place(REPLICA) * parts + place(DATA)}

    def setup_environment(self) -> None:
        """Set the device, initialise ``torch.distributed``, and make the mesh; collective."""
        from torch.distributed.device_mesh import init_device_mesh

        kind = self.root_device.type
        self.accelerator.setup_device(self.root_device)
        if not torch.distributed.is_initialized():
            backend = self._process_group_backend or ("nccl" if kind == "cuda" else "gloo")
            self._initialize_process_group(backend, self._timeout_of_groups)
        if self._device_mesh is None:
            names = (REPLICA, DATA, TENSOR)
            self._device_mesh = init_device_mesh(kind, self._shape, mesh_dim_names=names)
        self.lightning_module._device_mesh = self._device_mesh

    # checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: no rank has a whole model, and :meth:`save_checkpoint` writes parts."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing, likewise."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write each rank's parts, and the Trainer's state, to a folder; collective."""
        if self._interrupted:
            logger.warning("%s is not saved: after a failure parts may be missing", filepath)
            return
        filepath = self._agree_on_paths(checkpoint, filepath)
        self._restore_own_model()
        weights_only = "optimizer_states" not in checkpoint
        for folder, optimizer in self._folders(filepath, weights_only=weights_only):
            save_checkpoint(
                folder,
                self.lightning_module,
                optimizer,
                step=self.lightning_module.trainer.global_step,
                extra=checkpoint,
                replicas=self._replicas,
                keep=1,
                mesh=self._replica_mesh,
            )

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read this rank's parts into model and optimizers; return the Trainer's state."""
        state: dict[str, Any] = {}
        for folder, optimizer in reversed(list(self._folders(checkpoint_path))):
            module, mesh = self.lightning_module, self._replica_mesh
            found = load_checkpoint(folder, module, optimizer, mesh=mesh)
            if found is None:
                raise ArgumentError(
                    f"argument ckpt_path: {folder} holds no checkpoint of {type(self).__name__}"
                )
            state = dict(found.extra)
        return state

    def _folders(self, path: Any, *, weights_only: bool = False) -> Iterator[tuple[Path, Any]]:
        """Yield a folder for each optimizer; the first one's holds all that is needed for one."""
        optimizers: list[Any] = [] if weights_only else self.distributed_optimizers
        for number, optimizer in enumerate(optimizers or [None]):
            yield Path(path, f"optimizer_{number}") if number else Path(path), optimizer


def _shape(caller: str, data_parallel: int | str, tensor_parallel: int) -> tuple[int, int, int]:
    """Return the numbers of replicas, of data-parallel and of tensor-parallel ranks in each."""
    context = current()
    if data_parallel == "auto":
        data_parallel = max(context.size // context.machine_size // tensor_parallel, 1)
    sizes = data_parallel, tensor_parallel
    if not all(isinstance(one, int) and one > 0 for one in sizes):
        raise ArgumentError(
            f"{caller}: arguments data_parallel_size and tensor_parallel_size: expected positive "
            f"integers, got {data_parallel!r} and {tensor_parallel!r}"
        )
    of_one = int(data_parallel) * tensor_parallel
    if context.size % of_one:
        raise ArgumentError(
            f"{caller}: a replica of data_parallel_size={data_parallel} times "
            f"tensor_parallel_size={tensor_parallel} has {of_one} ranks, and the world of "
            f"{context.size} is no multiple of that; start {of_one} for each replica"
        )
    return context.size // of_one, int(data_parallel), tensor_parallel
