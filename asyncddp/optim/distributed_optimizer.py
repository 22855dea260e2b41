"""``DistributedOptimizer``: wraps an optimizer so that its steps also average with other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from asyncddp.algorithms import Algorithm
from asyncddp.algorithms.gradient_hooks import claim_parameters
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.phases import Closure
from asyncddp.algorithms.training_tracer import tracer_for
from asyncddp.algorithms.wrapper_setup import require_equal_replicas
from asyncddp.compression import Compressor
from asyncddp.context.context import use
from asyncddp.context.mesh_context import replica_context
from asyncddp.errors import ArgumentError, UsageError
from asyncddp.optim.algorithm_switch import AlgorithmSwitcher, SwitchSchedule
from asyncddp.optim.autotune import Autotune, checked_autotune
from asyncddp.optim.autotuner import Autotuner
from asyncddp.optim.distributed_optimizer_arguments import (
    WeightOverrideDescriptor,
    checked_flag,
    checked_models,
    checked_optimizer,
)
from asyncddp.optim.method_settings import MethodSettings
from asyncddp.optim.optimizer_wrapper import WindowMethodsMixin
from asyncddp.optim.parameter_sync import broadcast_parameters
from asyncddp.optim.switchable_optimizer import SwitchableOptimizer
from asyncddp.topology.builders import TopologyLike
from asyncddp.torch_modes import uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DistributedOptimizer(WindowMethodsMixin, SwitchableOptimizer):
    r"""Optimizer wrapper whose steps also average models or gradients with other ranks.

    .. math:: X^{+} = W X - U(G(X)), \qquad X^{+} = W (X - U(G(X))), \qquad
              x^{+} = x - U\big(\tfrac{1}{n} \textstyle\sum_i g_i\big)

    for ``adapt_with_combine``, ``adapt_then_combine`` and ``gradient_allreduce``, with U the update
    of the wrapped optimizer, whatever it is. The wrapper shares the optimizer's ``param_groups``,
    ``state`` and ``defaults``, so that schedulers on either work.

    The averaging takes place in the first step by which ``num_steps_per_communication`` backward
    passes were made since the last; a step counts as at least one. So J times backward and step, or
    J times backward and one step, average once. ``gradient_allreduce`` never makes a step with
    gradients that were not averaged.

    For a round, ``self_weight``, ``src_weights`` and ``dst_weights`` may be set by hand: before
    forward for ``adapt_with_combine``, before ``step()`` otherwise. None returns to the topology.

    ``win_put``, ``pull_get``, ``push_sum`` and ``async_model_average`` are asynchronous: ranks
    publish and read in windows, one for each bucket, and never wait for each other but where
    ``max_staleness`` or ``force_barrier`` say so. Weights set by hand then name neighbours of the
    topology, and ``dst_weights`` alone, or ``src_weights`` for ``pull_get``, are enough.

    Making one is collective: all ranks compare their parameters and settings, begin with rank 0's
    model, and make windows.

    Args:
        optimizer: The optimizer to wrap.
        model: The module that owns the optimizer's parameters, or a list of such modules. Give the
            compiled module where it is compiled with ``fullgraph=True``.
        algorithm: Name of a method in ``asyncddp.algorithms.ALGORITHMS``, or a subclass of
            ``asyncddp.algorithms.Algorithm``. ``adapt_then_combine`` is the fastest on one machine
            and allows the larger steps; ``adapt_with_combine`` hides the time of messages, for slow
            networks between machines.
        communication: ``"neighbor_allreduce"``, ``"hierarchical_neighbor_allreduce"``,
            ``"allreduce"`` or ``"empty"``; by default the first that the method allows.
        topology: Graph or schedule of ranks, or of machines for hierarchical communication; or a
            function that makes it for their number, or its name, such as ``"ring"``; None takes the
            one set with ``set_topology`` or ``set_machine_topology`` in each round.
        num_steps_per_communication: Backward passes between two averagings, J. Methods that have a
            ``communication_interval``, H, count steps of the optimizer by that instead.
        bucket_size_in_mb: MiB of parameters that travel in one message at most.
        update_in_backward: ``adapt_then_combine`` only: step and send each bucket as soon as its
            gradients are ready. Clipping, GradScaler and closures then come too late and are
            refused; the optimizer must treat each parameter by itself.
        max_staleness: One-sided methods only: wait for neighbours that are more than this many
            averagings behind this rank, up to the deadline; None never waits. Who has fewer to make
            says so in the end, by ``conclude()``.
        window_prefix: One-sided methods only: begins the names of the windows.
        scale_steps: ``push_sum``, ``ad_psgd`` and ``a2cid2`` only: whether to scale what a step
            changes by the number of steps that the ranks make on average to one of this rank, so
            that all count alike whatever their speed; None for the method's default, which is to
            do so with ``push_sum``.
        compression: Compressor, or its name, by which buckets travel; None for the method's
            default, which is mostly none. Methods that average gradients, or send differences as
            ``choco_sgd`` does, take any; those that average parameters take none unless
            ``plain_compression`` is True, since what is lost keeps the ranks apart.
        error_feedback: Methods that average gradients only: whether to add what compression has
            left out to the next step's gradients; None where the compressor needs it.
        plain_compression: Whether parameters may be averaged compressed.
        communication_buffer_in_mb: Methods that average parameters with neighbours only: MiB that
            messages and ring buffers may take, for one in-neighbour. Buckets then travel in pieces,
            with the same results. None takes 4 MiB where all ranks share memory, and sets no limit
            elsewhere: there ``adapt_with_combine`` hides no more than it has memory for.
        force: Whether to take a topology on which the method does not converge as it says.
        switch_at: ``{1000: "decentralized"}`` switches after 1000 steps, as :meth:`switch_to` does;
            a pair ``("decentralized", {"communication_interval": 2})`` gives arguments as well.
        autotune: Whether to search for the fastest bucket size, and for what else an
            :class:`Autotune` says, by the first steps' times; not with ``switch_at`` and methods
            whose ranks do not wait for each other.
        broadcast: Whether all ranks begin with rank 0's values of the optimizer's parameters, also
            of those that :meth:`add_param_group` adds, and of the model's dense buffers. False
            where they are to begin with models of their own. Parameters outside the optimizer
            stay, and so does what ``load_checkpoint`` has just given to each rank as its own.
        mesh: Where the model is sharded, by FSDP2 or tensor parallelism: the dimension of the mesh
            whose ranks average, such as ``mesh["replica"]``. Ranks, topology and averages then are
            those of replicas, and the optimizer keeps its DTensors.
        **options: Options of the method, such as ``hierarchical=True``.

    Attributes:
        self_weight, src_weights, dst_weights: Weights set by hand for neighbours.
        src_machine_weights, dst_machine_weights: The same for machines.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: An argument that cannot be, such as parameters that belong to no model.
        TopologyError: The method cannot live with the topology.
        MismatchError: Ranks differ in parameters or settings.

    Example:
        >>> import asyncddp as bf, torch
        >>> def train():
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, bf.rank())
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ...     optimizer = bf.DistributedOptimizer(optimizer, model, broadcast=False)
        ...     for _ in range(2):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 1)).sum().backward()
        ...         optimizer.step()
        ...     return model.weight.item()
        >>> with bf.local_world(2) as world:
        ...     world.run(train)
        [0.5, 0.5]
    """

    _step_supports_amp_scaling = True  # GradScaler calls step() and leaves the skipping to us

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | Iterable[torch.nn.Module],
        algorithm: str | type[Algorithm] = "adapt_then_combine",
        communication: str | None = None,
        topology: TopologyLike | None = None,
        num_steps_per_communication: int = 1,
        *,
        bucket_size_in_mb: float = 25,
        update_in_backward: bool = False,
        max_staleness: int | None = None,
        window_prefix: str | None = None,
        scale_steps: bool | None = None,
        compression: str | Compressor | None = None,
        error_feedback: bool | None = None,
        plain_compression: bool = False,
        communication_buffer_in_mb: float | None = None,
        force: bool = False,
        switch_at: SwitchSchedule | None = None,
        autotune: bool | Autotune | None = None,
        broadcast: bool = True,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        super().__init__(checked_optimizer(optimizer, DistributedOptimizer))
        context, models = replica_context(mesh), checked_models(model)
        settings = MethodSettings(
            algorithm,
            communication,
            topology,
            num_steps_per_communication,
            bucket_size_in_mb,
            update_in_backward,
            max_staleness,
            window_prefix,
            scale_steps,
            compression,
            error_feedback,
            plain_compression,
            communication_buffer_in_mb,
            force,
            checked_autotune(autotune),
            options,
        )
        require_equal_replicas(context, settings.describe(), topology)
        tracer = self._training_tracer = tracer_for(context, models)
        self._broadcast = checked_flag("broadcast", broadcast) and context.size > 1
        with use(context):
            self._switcher = AlgorithmSwitcher(
                context, optimizer, models, tracer, settings, switch_at, broadcast=self._broadcast
            )
        if settings.autotune is not None:
            self._autotuner = Autotuner(context, self._switcher, settings.autotune)
        self._initialized = True
        self._training_tracer.attach_hooks(models)

    @property
    @override
    def _averager(self) -> ModelAverager:
        return self._switcher.averager

    @override
    def _agreed(self, flag: bool) -> bool:
        inner = self._averager.inner
        if inner is None:
            return flag
        found, size = inner.sum([float(flag)])[0], inner.context.size
        if 0 < found < size:
            raise UsageError(
                f"DistributedOptimizer.step(): GradScaler has found infinities on {found:.0f} of "
                f"the replica's {size} ranks, whose scales would differ now; nothing was updated. "
                "Use DecentralizedDataParallel(..., scaler=scaler), which agrees, or torch.bfloat16"
            )
        return found > 0

    self_weight = WeightOverrideDescriptor("self_weight")
    src_weights = WeightOverrideDescriptor("src_weights")
    dst_weights = WeightOverrideDescriptor("dst_weights")
    src_machine_weights = WeightOverrideDescriptor("src_machine_weights")
    dst_machine_weights = WeightOverrideDescriptor("dst_machine_weights")

    @property
    def algorithm(self) -> str:
        """Return the name of the algorithm."""
        return self._averager.algorithm.name

    @property
    def communication(self) -> str:
        """Name of the communication; may be set before the first round, on all ranks."""
        return self._averager.communication.name

    @communication.setter
    def communication(self, name: str) -> None:
        self._averager.set_communication(name)

    @property
    def round(self) -> int:
        """Number of completed averagings, which is the index of the schedule's next round."""
        return self._averager.round

    @property
    def steps(self) -> int:
        """Number of completed steps, over all algorithms used."""
        return self._switcher.steps

    @property
    def bytes_sent(self) -> int:
        """Number of payload bytes sent by this rank to peers.

        A bucket counts once for each neighbour it is sent to; an allreduce of s bytes among n
        counts 2 (n - 1) / n s, what a ring sends, and halves are summed as float32.
        """
        return self._averager.bytes_sent

    @uncompiled
    def step(self, closure: Closure | None = None) -> Any:
        """Make one step of the wrapped optimizer, and average if a round is due.

        Args:
            closure: Evaluates the model and gives the loss; the parameters average after the
                first evaluation, so that its gradient is taken where the method says.

        Returns:
            What the wrapped optimizer's step returns; None where GradScaler skips the update.

        Raises:
            NotInitializedError: The world has ended, or this process was forked from its rank.
            UsageError: Parameters or gradients were changed where the method does not allow it, or
                :meth:`close` was called before.
            TopologyError: The method cannot live with the topology in use.
            PeerError: A peer failed, or does something else.
        """
        if self._closed:
            raise UsageError("DistributedOptimizer.step(): called after close(); wrap it anew")
        if not self._averager.single_rank:
            self._averager.context.engine.ensure_open("DistributedOptimizer.step()")
        scaled = getattr(self, "found_inf", None) is not None
        update = self._training_tracer.update(self._step_wrapped)
        result = self._phase.step(update, closure, scaled=scaled)
        self._end_step()
        return result

    def _end_step(self) -> None:
        """Count a step, and do the work that is due between two steps."""
        self._training_tracer.end_step()
        self._switcher.end_step()
        if self._autotuner is not None:
            self._autotuner.end_step()

    def synchronize(self) -> None:
        """Finish averaging the gradients, before they are clipped or unscaled.

        With ``gradient_allreduce`` gradients are averaged when the J-th backward pass returns, with
        ``num_steps_per_communication=J``. Where fewer passes were made, such as at the end of an
        epoch, this call averages what they have accumulated; otherwise ``step()`` does. All ranks
        must call it. Without effect with all other methods, which average parameters.

        Raises:
            PeerError: A peer failed, or does something else.
        """
        self._phase.synchronize()

    @override
    def conclude(self) -> None:
        super().conclude()
        self._switcher.too_few_rounds.tell()

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimizer does."""
        self._wrapped.zero_grad(set_to_none)
        self._phase.on_zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, with rank 0's values; collective.

        They keep each rank's values where the wrapper was made with ``broadcast=False``.

        Args:
            param_group: As in ``torch.optim.Optimizer.add_param_group``.

        Raises:
            ArgumentError: A parameter belongs to none of the models.
            MismatchError: Ranks add different parameters.
        """
        if not self._initialized:
            return  # called by torch's constructor about groups that are there
        self._wrapped.add_param_group(param_group)
        try:
            self._phase.config.optimizer_parameters()
        except ArgumentError:
            self._wrapped.param_groups.pop()
            raise
        self._phase.wait_for_reads()
        claim_parameters(param_group["params"], self._phase)
        if self._broadcast:
            with use(self._averager.context):
                broadcast_parameters(param_group["params"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.algorithm}, {self.communication}, {self._wrapped!r})"
