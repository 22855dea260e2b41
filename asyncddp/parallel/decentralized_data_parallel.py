"""``DecentralizedDataParallel``: wraps a model; its backward passes step and average it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from asyncddp.algorithms import Algorithm
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.neighbor_progress import NeighborProgressMixin
from asyncddp.algorithms.phases.optimizer_buckets import LRSchedulerFn, OptimFn
from asyncddp.algorithms.phases.previous_step import PreviousStepPhase
from asyncddp.algorithms.training_tracer import tracer_for
from asyncddp.algorithms.wrapper_setup import check_weights, next_label, require_equal_settings
from asyncddp.context import current
from asyncddp.errors import ArgumentError
from asyncddp.ops.settings_agreement import require_equal_tensors, tensors_of
from asyncddp.optim.method_settings import MethodSettings
from asyncddp.optim.parameter_sync import broadcast_start, starting_tensors
from asyncddp.parallel.argument_validation import checked_config, checked_model, checked_parameters
from asyncddp.parallel.reducer import AlgorithmReducer, Reducer
from asyncddp.parallel.switchable_module import SwitchableModule
from asyncddp.tensors.buckets import require_untied
from asyncddp.topology.builders import TopologyLike

_NAME = "DecentralizedDataParallel"


class DecentralizedDataParallel(NeighborProgressMixin, SwitchableModule):
    r"""Wrap a model so that its backward pass updates it and averages it with the neighbours'.

    .. math:: X_{k+1} = W_k X_k - U\big(X_k, G(X_k)\big)

    with :math:`U` the update of the user's own optimizer: ``adapt_with_combine``, bucket by bucket.
    The training loop has no optimizer calls::

        for x, y in batches:
            loss_fn(ddp(x), y).backward()

    As soon as all gradients of a bucket are there, its average with the neighbours is put in place,
    its optimizer and scheduler make a step, its gradients are dropped, and the result is sent; the
    next forward and backward pass hide the message. Each backward pass that reaches a parameter is
    one step, in training mode and outside :meth:`no_sync`. The first pass settles the buckets by
    the order of its gradients, which is compared over the ranks; its own step is made at its end.
    Parameters that it did not use get buckets of their own, which travel too.

    ``sync=False`` goes through windows: a rank mixes with what its neighbours have put last and
    waits for nobody,

    .. math:: x_i \leftarrow w_{ii} x_i + \sum_j w_{ij} \hat{x}_j - u_i

    with :math:`\hat{x}_j` the newest of rank j that has come. This does not keep the mean over
    ranks; it keeps the ranks together.

    Any other ``algorithm`` of :class:`asyncddp.DistributedOptimizer` averages as it says there,
    with one optimizer for all parameters, whose step the end of a backward pass makes.

    Making one is collective, as are the end of the first backward pass, :meth:`global_avg` and
    :meth:`eval`, and with ``sync=False`` also :meth:`set_topology`, :meth:`close` and loading a
    state. A pass that fails half-way is ended by the next forward pass: what was not updated is
    mixed all the same, and its gradients are dropped.

    Args:
        model: The module to train, on its device and in its dtype. Which parameters require
            gradients is settled here. The others stay as they are.
        optim_fn: ``optim_fn([(name, parameter), ...])`` gives the optimizer of a bucket; it is
            called at the end of the first backward pass.
        lr_scheduler_fn: ``lr_scheduler_fn(optimizer)`` gives its scheduler, which makes a step in
            each step.
        topology: Graph or schedule of ranks, with the step as its round, or a function of the
            number of ranks that makes it, or its name; None takes the one set with ``set_topology``
            in each step.
        sync: Whether a step waits for the neighbours' last step.
        scaler: A GradScaler, by which the user scales the loss; everything else is done here. A
            rank that skips its update, which is that of all its buckets, mixes all the same.
        grad_clip_norm: Largest norm of the rank's gradients together; 0 clips nothing. With it, or
            with a scaler, all buckets make their steps at the end of the backward pass: messages
            still travel during the next forward and backward, updates hide behind nothing.
        bucket_size_in_mb: MiB of parameters that travel in one message at most.
        param_as_bucket_view: Whether parameters become views of the buckets, in their own memory
            format; they are copied to and fro otherwise.
        sync_buffer_in_global_avg: Whether :meth:`global_avg` and :meth:`eval` average
            floating-point buffers as well.
        algorithm: Name of a method, or a subclass of ``asyncddp.algorithms.Algorithm``.
        broadcast: Whether all ranks begin with rank 0's parameters and dense buffers, but for what
            ``load_checkpoint`` has just given to each rank as its own.
        init_sync: Older name of ``broadcast``.
        **options: Of the algorithm, and other arguments of the optimizer wrapper, such as
            ``compression`` and ``autotune``.

    Attributes:
        module: The model, whose parameters, buffers and submodules are the wrapper's by name.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: An argument that cannot be.
        TopologyError: The topology does not fit.
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
        **options: Any,
    ) -> None:
        super().__init__(checked_model(model, DecentralizedDataParallel))
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
        context, self._averages_buffers = current(), bool(sync_buffer_in_global_avg)
        self._config, named = config, checked_parameters(model)
        equal = context.size > 1 and bool(broadcast and init_sync)
        starts = starting_tensors([model]) if equal else {}
        settings = [f"sync={bool(sync)}", f"broadcast={equal}"]
        settings.append(f"bucket size {config.bucket_bytes} bytes")
        settings.append(f"sync_buffer_in_global_avg={self._averages_buffers}")
        require_equal_settings(context, _NAME, [*settings, method.describe()], named, starts)
        require_equal_tensors(context, _NAME, tensors_of(model))
        broadcast_start(starts.values())
        self._tracer = tracer_for(context, [model])
        self._reducer = self._reducer_for(method, sync=bool(sync))
        self._tracer.attach_hooks([model])

    def _reducer_for(self, method: MethodSettings, *, sync: bool) -> Reducer:
        """Create the reducer: bucket by bucket for the default algorithm, or that of any."""
        named, config = checked_parameters(self.module), self._config
        if method.is_plain("adapt_with_combine"):
            if method.autotune:
                raise ArgumentError(
                    "argument autotune: the default algorithm cuts its buckets once, by the first "
                    "backward pass; expected another one as well, such as "
                    "algorithm='adapt_then_combine', or autotune=False"
                )
            require_untied(named, tensors_of(self.module).items())
            context = current()
            settings = context, next_label(context, _NAME), method.topology
            phase = PreviousStepPhase(named, config, self._tracer, *settings, sync=sync)
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
        """Let gradients add up: no backward pass inside is a step.

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
        """Let gradients add up from now on; set it back before the pass that ends the step."""
        self._reducer.accumulate(bool(enable))

    def set_topology(self, topology: TopologyLike | None) -> None:
        """Take another topology in mid-run; all ranks call it after the same step.

        Args:
            topology: Graph or schedule; None for the context's. With ``sync=True`` it counts from
                the next message on, the pending one is averaged by the old one. With
                ``sync=False`` the windows are made anew, which is collective.

        Raises:
            TopologyError: It does not fit; the old one stays in use.
            UsageError: After :meth:`close`.
        """
        self._require_open("set_topology")
        self._reducer.set_topology(topology)

    @property
    def steps(self) -> int:
        """Steps completed so far, which is the round of the topology that comes next."""
        return self._reducer.steps

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers, one for each bucket; none before the end of the first backward pass."""
        return [one.optimizer for one in self._reducer.buckets]

    @property
    def lr_schedulers(self) -> list[LRScheduler]:
        """Learning rate schedulers, one for each bucket, all in the same state."""
        return [one.scheduler for one in self._reducer.buckets if one.scheduler is not None]

    @property
    def bucket_names(self) -> list[list[str]]:
        """Names of the parameters of each bucket, in the order of their gradients."""
        return [list(bucket.names) for bucket in self._reducer.buckets]

    def conclude(self) -> None:
        """Announce that no step follows here for now; with ``sync=True`` it has no effect.

        Neighbours that make more steps than this rank then give its weight to themselves, until its
        next step. :meth:`global_avg`, :meth:`eval` and the end of the script say so as well.
        """
        self._reducer.end_failed_step()
        if self._reducer.optimizer is not None:
            self._reducer.optimizer.conclude()
        else:
            super().conclude()

    # closing

    def close(self) -> None:
        """Stop training and release the model, which keeps this rank's own parameters.

        Nobody has to: a wrapper that is dropped lets go by itself, its windows when the world ends.
        With ``sync=False`` it is collective.
        """
        if not self._closed:
            self._closed = True
            self._restore_own()
            self._reducer.detach()
            self._reducer.close()
