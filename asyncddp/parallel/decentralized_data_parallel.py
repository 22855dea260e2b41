"""``DecentralizedDataParallel``, a model wrapper: backward passes update and average the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from asyncddp.algorithms import Algorithm
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.neighbor_progress import NeighborProgressMixin
from asyncddp.algorithms.phases.backward_averaging import BackwardAveragingPhase
from asyncddp.algorithms.phases.optimizer_buckets import LRSchedulerFn, OptimFn
from asyncddp.algorithms.training_tracer import tracer_for
from asyncddp.algorithms.wrapper_setup import (
    check_weights,
    next_label,
    require_equal_replicas,
    require_equal_settings,
)
from asyncddp.context.context import use
from asyncddp.context.mesh_context import replica_context
from asyncddp.errors import ArgumentError
from asyncddp.ops.settings_agreement import require_equal_tensors, tensors_of
from asyncddp.optim.method_settings import MethodSettings
from asyncddp.optim.parameter_sync import broadcast_start, starting_tensors
from asyncddp.parallel.argument_validation import (
    checked_config,
    checked_model,
    checked_parameters,
)
from asyncddp.parallel.reducer import AlgorithmReducer, Reducer
from asyncddp.parallel.switchable_module import SwitchableModule
from asyncddp.tensors.buckets import require_untied
from asyncddp.topology.builders import TopologyLike

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NAME = "DecentralizedDataParallel"


class DecentralizedDataParallel(NeighborProgressMixin, SwitchableModule):
    r"""Model wrapper: its backward pass updates the model and averages it with the neighbours'.

    .. math:: X_{k+1} = W_k X_k - U\big(X_k, G(X_k)\big)

    with :math:`U` the update of the user's own optimizer: ``adapt_with_combine``, bucket by bucket.
    The training loop has no optimizer calls::

        for x, y in batches:
            loss_fn(ddp(x), y).backward()

    As soon as all gradients of a bucket are ready, its parameters are replaced by their average
    with the neighbours, its optimizer and scheduler make a step, its gradients are dropped, and
    the result is sent; the message overlaps with the next forward and backward pass. Each backward
    pass that reaches a parameter is one step, in training mode and outside :meth:`no_sync`. The
    first pass assigns parameters to buckets in the order of their gradients, which is compared
    over the ranks; its own step is made at its end. Parameters that it did not use get buckets of
    their own, which are sent too.

    With ``sync=False``, a rank averages with the newest parameters that its neighbours have put
    into its windows, and waits for no rank:

    .. math:: x_i \leftarrow w_{ii} x_i + \sum_j w_{ij} \hat{x}_j - u_i

    with :math:`\hat{x}_j` the newest parameters received from rank j. This does not preserve the
    mean over ranks, but keeps the ranks close to each other.

    Any other ``algorithm`` averages as in :class:`asyncddp.DistributedOptimizer`, with one
    optimizer for all parameters; it makes its step at the end of a backward pass.

    The constructor is collective, as are the end of the first backward pass, :meth:`global_avg` and
    :meth:`eval`, and with ``sync=False`` also :meth:`set_topology`, :meth:`close` and loading a
    state. If a backward pass fails, the next forward pass ends its step: parameters that were not
    updated are averaged all the same, and their gradients are dropped.

    Args:
        model: The module to train, on its device and in its dtype. Parameters that do not require
            gradients at this point are never trained.
        optim_fn: ``optim_fn([(name, parameter), ...])`` returns the optimizer of a bucket; it is
            called at the end of the first backward pass.
        lr_scheduler_fn: ``lr_scheduler_fn(optimizer)`` returns an optimizer's scheduler, which
            steps with it.
        topology: Graph or schedule of ranks (step k uses round k), its name, or a function that
            makes it from the number of ranks; None uses the one set with ``set_topology``, looked
            up in each step.
        sync: Whether a step waits for the neighbours' last step.
        scaler: GradScaler that the user scales the loss with; the wrapper unscales, steps and
            updates it. A rank that skips its update skips it for all buckets, and averages anyway.
        grad_clip_norm: Largest norm of all gradients of the rank together; 0 clips nothing. With
            it, or with a scaler, all buckets make their steps at the end of the backward pass:
            messages still overlap with the next forward and backward pass, but updates do not.
        bucket_size_in_mb: MiB of parameters per message, at most.
        param_as_bucket_view: Whether parameters become views of the buckets, in their own memory
            format; otherwise they are copied to the bucket and back.
        sync_buffer_in_global_avg: Whether :meth:`global_avg` and :meth:`eval` average
            floating-point buffers as well.
        algorithm: Name of a method, or a subclass of ``asyncddp.algorithms.Algorithm``.
        broadcast: Whether all ranks begin with rank 0's parameters and dense buffers, except for
            tensors that ``load_checkpoint`` has just loaded for each rank.
        init_sync: Older name of ``broadcast``.
        mesh: Where the model is sharded: the dimension of the mesh whose ranks average, as of
            :class:`asyncddp.DistributedOptimizer`.
        **options: Options of the algorithm, and other arguments of the optimizer wrapper, such as
            ``compression`` and ``autotune``.

    Attributes:
        module: The model; the wrapper has the same parameters, buffers and submodules by name.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: An argument is invalid.
        TopologyError: The topology does not fit the ranks.
        MismatchError: Ranks differ in parameters or settings.

    Example:
        >>> import asyncddp as bf, torch
        >>> def train():
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, bf.rank())
        ...     sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=0.0)
        ...     ddp = bf.DecentralizedDataParallel(model, sgd, broadcast=False)
        ...     ddp(torch.ones(1, 1)).sum().backward()
        ...     return ddp.weight.item()
        >>> with bf.local_world(2) as world:
        ...     world.run(train)
        [0.5, 0.5]

    References:
        Wang et al., "From promise to practice: realizing high-performance decentralized training",
        ICLR 2025.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optim_fn: OptimFn,
        lr_scheduler_fn: LRSchedulerFn | None = None,
        topology: TopologyLike | None = None,
        sync: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        grad_clip_norm: float = 0.0,
        bucket_size_in_mb: float = 25,
        param_as_bucket_view: bool = True,
        sync_buffer_in_global_avg: bool = False,
        *,
        algorithm: str | type[Algorithm] = "adapt_with_combine",
        broadcast: bool = True,
        init_sync: bool = True,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        super().__init__(checked_model(model, DecentralizedDataParallel))
        self._context = context = replica_context(mesh)
        config = checked_config(
            optim_fn,
            lr_scheduler_fn,
            scaler,
            grad_clip_norm,
            bucket_size_in_mb,
            param_as_bucket_view,
        )
        method = MethodSettings.of(
            algorithm, {"topology": topology, "bucket_size_in_mb": bucket_size_in_mb, **options}
        )
        self._averages_buffers = bool(sync_buffer_in_global_avg)
        self._config, named = config, checked_parameters(context, model)
        require_equal_replicas(context, method.describe(), topology)
        equal = context.size > 1 and bool(broadcast and init_sync)
        starts = starting_tensors([model]) if equal else {}
        settings = [f"sync={bool(sync)}", f"broadcast={equal}"]
        settings.append(f"bucket size {config.bucket_bytes} bytes")
        settings.append(f"sync_buffer_in_global_avg={self._averages_buffers}")
        require_equal_settings(context, _NAME, [*settings, method.describe()], named, starts)
        require_equal_tensors(context, _NAME, tensors_of(model))
        self._tracer = tracer_for(context, [model])
        with use(context):
            broadcast_start(starts.values())
            self._reducer = self._reducer_for(method, sync=bool(sync))
        self._tracer.attach_hooks([model])

    def _reducer_for(self, method: MethodSettings, *, sync: bool) -> Reducer:
        """Create a bucketwise reducer for the default algorithm, or one that wraps an optimizer."""
        context, config = self._context, self._config
        named = checked_parameters(context, self.module)
        if method.is_plain("adapt_with_combine"):
            if method.autotune:
                raise ArgumentError(
                    "argument autotune: the default algorithm cuts its buckets once, by the first "
                    "backward pass; expected another one as well, such as "
                    "algorithm='adapt_then_combine', or autotune=False"
                )
            require_untied(named, tensors_of(self.module).items())
            settings = context, next_label(context, _NAME), method.topology
            phase = BackwardAveragingPhase(named, config, self._tracer, *settings, sync=sync)
            check_weights(phase.averager, _NAME)
            return Reducer(named, config, phase)
        if not sync:
            raise ArgumentError(
                "argument sync: False is for the default algorithm; expected True, or "
                f"algorithm='win_put', which waits for nobody, in place of {method.algorithm!r}"
            )
        return AlgorithmReducer(self.module, named, method, config)

    @property
    @override
    def _averager(self) -> ModelAverager:
        return self._reducer.averager

    # training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass."""
        trains = self.training and torch.is_grad_enabled() and not self._closed
        if trains:
            self._reducer.end_failed_step()
        output = self.module(*args, **kwargs)
        if trains:
            self._reducer.backward_pass.hook(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in a ``with`` block: backward passes inside make no step.

        Example:
            >>> import asyncddp as bf, torch
            >>> def train():
            ...     sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=1.0)
            ...     ddp = bf.DecentralizedDataParallel(torch.nn.Linear(1, 1), sgd)
            ...     with ddp.no_sync():
            ...         ddp(torch.ones(1, 1)).sum().backward()
            ...     ddp(torch.ones(1, 1)).sum().backward()
            ...     return ddp.steps
            >>> with bf.local_world(2) as world:
            ...     world.run(train)
            [1, 1]
        """
        before = self._reducer.accumulating
        self.set_accumulate_grad(True)
        try:
            yield
        finally:
            self.set_accumulate_grad(before)

    def set_accumulate_grad(self, enable: bool = True) -> None:
        """Start or stop accumulating gradients; stop before the step's last backward pass."""
        self._reducer.accumulate(bool(enable))

    def set_topology(self, topology: TopologyLike | None) -> None:
        """Replace the topology during training; all ranks call it after the same step.

        Args:
            topology: Graph or schedule; None for the context's. With ``sync=True`` it applies from
                the next message on; a pending message is averaged with the old topology. With
                ``sync=False`` the windows are created again, which is collective.

        Raises:
            TopologyError: The topology does not fit; the old one stays in use.
            UsageError: After :meth:`close`.
        """
        self._require_open("set_topology")
        self._reducer.set_topology(topology)

    @property
    def steps(self) -> int:
        """Number of completed steps; the next step uses this round of the topology."""
        return self._reducer.steps

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers, one per bucket; empty before the end of the first backward pass."""
        return [one.optimizer for one in self._reducer.buckets]

    @property
    def lr_schedulers(self) -> list[LRScheduler]:
        """Learning rate schedulers, one per bucket, all in the same state."""
        return [one.scheduler for one in self._reducer.buckets if one.scheduler is not None]

    @property
    def bucket_names(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order in which gradients become ready."""
        return [list(bucket.names) for bucket in self._reducer.buckets]

    def conclude(self) -> None:
        """Tell neighbours that this rank makes no more steps for now; no effect with ``sync=True``.

        Until its next step, neighbours then add this rank's weight to their own.
        :meth:`global_avg`, :meth:`eval` and the end of the script tell neighbours the same.
        """
        self._reducer.end_failed_step()
        if self._reducer.optimizer is not None:
            self._reducer.optimizer.conclude()
        else:
            super().conclude()

    # closing

    def close(self) -> None:
        """Stop training and release the model with this rank's own parameters.

        The call is optional: a wrapper that is garbage-collected removes its hooks, and its windows
        are freed when the world ends. With ``sync=False`` it is collective.
        """
        if not self._closed:
            self._closed = True
            self._restore_own()
            self._reducer.detach()
            self._reducer.close()
