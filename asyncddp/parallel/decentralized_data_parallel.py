"""``DecentralizedDataParallel``: wraps a model; its backward passes step and average it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from asyncddp.algorithms.model_averager import ModelAverager, NeighborProgressMixin
from asyncddp.algorithms.training_tracer import tracer_for
from asyncddp.algorithms.wrapper_setup import next_label, require_equal_setup
from asyncddp.context import current
from asyncddp.errors import ArgumentError
from asyncddp.ops.broadcast import broadcast_nonblocking_
from asyncddp.ops.settings_agreement import require_equal_tensors, tensors_of
from asyncddp.parallel.argument_validation import checked_config, checked_model, checked_parameters
from asyncddp.parallel.bucket_averager import BucketAverager
from asyncddp.parallel.bucket_optimizer_state import check_state
from asyncddp.parallel.module_wrapper import AveragedModelAccess
from asyncddp.parallel.optimizer_buckets import LRSchedulerFn, OptimFn
from asyncddp.parallel.reducer import Reducer
from topology import GraphOrSchedule

_NAME = "DecentralizedDataParallel"


class DecentralizedDataParallel(NeighborProgressMixin, AveragedModelAccess):
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
        topology: Graph or schedule of ranks, with the step as its round; None takes the one set
            with ``set_topology`` in each step.
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
        init_sync: Whether all ranks begin with the parameters and buffers of rank 0.

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
        ...     ddp = bf.DecentralizedDataParallel(model, sgd, init_sync=False)
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
        topology: GraphOrSchedule | None = None,
        sync: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        grad_clip_norm: float = 0.0,
        bucket_size_in_mb: float = 25,
        param_as_bucket_view: bool = True,
        sync_buffer_in_global_avg: bool = False,
        *,
        init_sync: bool = True,
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
        context, self._averages_buffers = current(), bool(sync_buffer_in_global_avg)
        named, label = checked_parameters(model), next_label(context, _NAME)
        bucket_averager = BucketAverager(context, label, topology, sync=bool(sync))
        settings = [f"wrapper {label!r}", f"sync={bool(sync)}", f"init_sync={bool(init_sync)}"]
        settings.append(f"bucket size {config.bucket_bytes} bytes")
        settings.append(f"sync_buffer_in_global_avg={self._averages_buffers}")
        require_equal_setup(bucket_averager.averager, _NAME, settings, named)
        every = tensors_of(model)
        require_equal_tensors(context, _NAME, every)
        if init_sync:
            handles = [broadcast_nonblocking_(tensor.detach(), 0) for tensor in every.values()]
            for handle in handles:
                handle.wait()
        tracer = tracer_for(context, [model])
        self._reducer = Reducer(named, bucket_averager, config, tracer)
        tracer.attach_hooks([model])

    @property
    @override
    def _averager(self) -> ModelAverager:
        return self._reducer.bucket_averager.averager

    # training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass."""
        trains = self.training and torch.is_grad_enabled() and not self._closed
        if trains:
            self._reducer.end_failed_step()
        output = self.module(*args, **kwargs)
        if trains:
            self._reducer.hook_backward(output)
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
        self._reducer.accumulating = bool(enable)

    def set_topology(self, topology: GraphOrSchedule | None) -> None:
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
        self._reducer.bucket_averager.set_topology(topology)

    @property
    def steps(self) -> int:
        """Steps completed so far, which is the round of the topology that comes next."""
        return self._averager.round

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers, one for each bucket; none before the end of the first backward pass."""
        return [bucket.optimizer for bucket in self._reducer.buckets]

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
        super().conclude()

    # checkpoints

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Give the model another state; all ranks do, after the same step.

        Pending averages are dropped, and sent anew by the next backward pass: a run that is resumed
        with this and :meth:`load_optim_state_dict` goes on as if it had not been interrupted.

        Args:
            state_dict: What ``state_dict()`` of this or of the plain model gave; each rank's own.
            strict: As for the model.
            assign: Must be False: parameters keep their memory.

        Raises:
            ArgumentError: ``assign=True``.
        """
        if assign:
            raise ArgumentError(
                "load_state_dict: argument assign: expected False, since parameters live in "
                "buckets, got True; load into the model before DecentralizedDataParallel gets it"
            )
        self._reducer.end_failed_step()
        self._reducer.bucket_averager.wait_for_reads()
        self._backup = None
        found = self.module.load_state_dict(state_dict, strict)
        self._reducer.bucket_averager.restart(averaged=False)
        return found

    def optim_state_dict(self) -> dict[str, Any]:
        """Return the state of all optimizers and schedulers by parameter name, and the step.

        It does not depend on the buckets, so that a run may go on with others. As torch's own it
        refers to the tensors in use; save it, or copy it, before the next step.
        """
        return self._reducer.state

    def load_optim_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`optim_state_dict` gave, at any time between two steps.

        Args:
            state_dict: This rank's own; all ranks load one.

        Raises:
            ArgumentError: It is something else, or of another model.
        """
        check_state(state_dict, [name for name, _ in self._reducer.named_parameters])
        self._reducer.end_failed_step()
        self._reducer.state = state_dict
        self._reducer.bucket_averager.restart(averaged=False)

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
            self._reducer.bucket_averager.close()
