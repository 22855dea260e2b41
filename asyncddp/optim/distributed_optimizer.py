"""``DistributedOptimizer``: wraps an optimizer so that its steps average with other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from asyncddp.algorithms import Algorithm
from asyncddp.algorithms.gradient_hooks import claim_parameters
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.phases import Closure, PhaseConfig, phase_for
from asyncddp.algorithms.training_tracer import tracer_for
from asyncddp.algorithms.wrapper_setup import (
    checked_bucket_bytes,
    checked_integer,
    next_label,
    require_equal_setup,
)
from asyncddp.context import current
from asyncddp.errors import ArgumentError
from asyncddp.optim.distributed_optimizer_arguments import (
    WeightOverrideDescriptor,
    checked_algorithm,
    checked_models,
    checked_optimizer,
    checked_prefix,
    checked_scale_steps,
    checked_staleness,
    describe_settings,
)
from asyncddp.optim.optimizer_wrapper import TransparentOptimizerWrapper, WindowMethodsMixin
from asyncddp.torch_modes import uncompiled
from topology import GraphOrSchedule

_KEY = "asyncddp"
_NAME = "DistributedOptimizer"


class DistributedOptimizer(WindowMethodsMixin, TransparentOptimizerWrapper):
    r"""Wrap an optimizer so that its steps also average models or gradients with other ranks.

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

    Making one is collective: all ranks compare their parameters and settings, and make windows.

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
        topology: Graph or schedule of ranks, or of machines for hierarchical communication; None
            takes the one set with ``set_topology`` or ``set_machine_topology`` in each round.
        num_steps_per_communication: Backward passes between two averagings, J.
        bucket_size_in_mb: MiB of parameters that travel in one message at most.
        update_in_backward: ``adapt_then_combine`` only: step and send each bucket as soon as its
            gradients are ready. Clipping, GradScaler and closures then come too late and are
            refused; the optimizer must treat each parameter by itself.
        max_staleness: One-sided methods only: wait for neighbours that are more than this many
            averagings behind this rank, up to the deadline; None never waits. Who has fewer to make
            says so in the end, by ``conclude()``.
        window_prefix: One-sided methods only: begins the names of the windows.
        scale_steps: ``push_sum`` only: whether to scale what a step changes by the number of steps
            that the ranks make on average to one of this rank, so that all count alike whatever
            their speed; None for the method's default, which is to do so.

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
        ...     optimizer = bf.DistributedOptimizer(optimizer, model)
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
        topology: GraphOrSchedule | None = None,
        num_steps_per_communication: int = 1,
        *,
        bucket_size_in_mb: float = 25,
        update_in_backward: bool = False,
        max_staleness: int | None = None,
        window_prefix: str | None = None,
        scale_steps: bool | None = None,
    ) -> None:
        super().__init__(checked_optimizer(optimizer, DistributedOptimizer))
        context, method = current(), checked_algorithm(algorithm)
        label = checked_prefix(window_prefix, method) or next_label(context, _NAME)
        self._averager = ModelAverager(context, method, communication, topology, label)
        self._averager.max_staleness = checked_staleness(max_staleness, method)
        self._averager.windows.scales_steps = checked_scale_steps(scale_steps, method)
        models = checked_models(model)
        steps = checked_integer(
            "argument num_steps_per_communication", num_steps_per_communication, 1
        )
        size = checked_bucket_bytes(bucket_size_in_mb)
        self._training_tracer = tracer_for(context, models)
        config = PhaseConfig(self._averager, optimizer, models, steps, size, self._training_tracer)
        settings = describe_settings(config, update_in_backward)
        require_equal_setup(self._averager, _NAME, settings, config.optimizer_parameters())
        self._phase = phase_for(config, update_in_backward=update_in_backward)
        self._initialized = True
        claim_parameters((parameter for _, parameter in self._phase.named_parameters), self._phase)
        self._training_tracer.attach_hooks(models)

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
        """Name of the communication; may be set before any round, on all ranks."""
        return self._averager.communication.name

    @communication.setter
    def communication(self, name: str) -> None:
        self._averager.set_communication(name)

    @property
    def round(self) -> int:
        """Number of averagings completed, which is the index of the schedule's next round."""
        return self._averager.round

    @property
    def bytes_sent(self) -> int:
        """Number of payload bytes that this rank has sent to peers.

        A bucket counts once for each neighbour it is sent to; an allreduce of s bytes among n
        counts 2 (n - 1) / n s, what a ring sends, and halves are summed as float32.
        """
        return self._averager.bytes_sent

    @uncompiled
    def step(self, closure: Closure | None = None) -> Any:
        """Make one step of the wrapped optimizer, and average when it is time to.

        Args:
            closure: Evaluates the model and gives the loss; the parameters average after the
                first evaluation, so that its gradient is taken where the method says.

        Returns:
            What the wrapped optimizer's step returns; None where GradScaler skips the update.

        Raises:
            NotInitializedError: The world has ended, or this process was forked from its rank.
            UsageError: Parameters or gradients were changed where the method does not allow it.
            TopologyError: The method cannot live with the topology in use.
            PeerError: A peer failed, or does something else.
        """
        if not self._averager.single_rank:
            self._averager.context.engine.ensure_open("DistributedOptimizer.step()")
        scaled = getattr(self, "found_inf", None) is not None
        update = self._training_tracer.update(self._step_wrapped)
        result = self._phase.step(update, closure, scaled=scaled)
        self._training_tracer.end_step()
        return result

    def synchronize(self) -> None:
        """Average the gradients that are not averaged yet, before they are clipped or unscaled.

        With ``gradient_allreduce`` gradients are averaged when the J-th backward pass returns, with
        ``num_steps_per_communication=J``. Where fewer passes were made, such as at the end of an
        epoch, this call averages what they have accumulated; otherwise ``step()`` does. All ranks
        must call it. Without effect with all other methods, which average parameters.

        Raises:
            PeerError: A peer failed, or does something else.
        """
        self._phase.synchronize()

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimizer does."""
        self._wrapped.zero_grad(set_to_none)
        self._phase.on_zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model; all ranks must add the same.

        Args:
            param_group: As in ``torch.optim.Optimizer.add_param_group``.

        Raises:
            ArgumentError: A parameter belongs to none of the models.
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

    @property
    def counters(self) -> dict[str, int]:
        """Rounds that this wrapper has completed, and backward passes since the last one."""
        return {"round": self._averager.round, "passes": self._phase.accumulation.carried_passes}

    @counters.setter
    def counters(self, counters: dict[str, int]) -> None:
        self._averager.round = counters["round"]
        self._phase.accumulation.carried_passes = counters["passes"]

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with this wrapper's counters in ``"asyncddp"``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = dict(self._wrapped.state_dict())
        state[_KEY] = self.counters
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state; one of a plain optimizer starts the counters anew.

        With one-sided methods what neighbours have published before is forgotten, and push-sum goes
        on from the de-biased parameters with p = 1; so load on all ranks between two barriers, or
        before the first step.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._phase.reset()
        self._averager.windows.reset()
        self._wrapped.load_state_dict({k: v for k, v in state_dict.items() if k != _KEY})
        self.counters = state_dict.get(_KEY, {"round": 0, "passes": 0})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.algorithm}, {self.communication}, {self._wrapped!r})"
