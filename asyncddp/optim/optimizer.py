"""The one wrapper: a user's optimizer whose steps also average with other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from asyncddp.algorithms import Algorithm
from asyncddp.algorithms.mixer import Mixer
from asyncddp.algorithms.owners import take_over
from asyncddp.algorithms.recorded import training_of
from asyncddp.algorithms.rhythms import Closure, Setting, rhythm_for
from asyncddp.context import Context, current
from asyncddp.errors import ArgumentError
from asyncddp.memory.modes import uncompiled
from asyncddp.optim.agreement import agree, facts_of
from asyncddp.optim.arguments import (
    ByHand,
    checked_algorithm,
    checked_cap,
    checked_models,
    checked_optimizer,
    checked_prefix,
    checked_scale_steps,
    checked_staleness,
    checked_steps,
)
from asyncddp.optim.one_sided import WindowControls
from asyncddp.optim.scaling import overflowed, unscale
from topology import GraphOrSchedule

__all__ = ["DistributedOptimizer"]

_KEY = "asyncddp"


class DistributedOptimizer(WindowControls, torch.optim.Optimizer):
    r"""Wrap an optimizer so that its steps also average with other ranks.

    .. math:: X^{+} = W X - U(G(X)), \qquad X^{+} = W (X - U(G(X))), \qquad
              x^{+} = x - U\big(\tfrac{1}{n} \textstyle\sum_i g_i\big)

    for ``adapt_with_combine``, ``adapt_then_combine`` and ``gradient_allreduce``, with U the update
    of the wrapped optimizer, whatever it is. The wrapper shares the optimizer's ``param_groups``,
    ``state`` and ``defaults``, so that schedulers on either work.

    The averaging takes place in the first step by which ``num_steps_per_communication`` backward
    passes were made since the last; a step counts as at least one pass, and a closure as one. So
    J times backward and step, or J times backward and one step, average once.
    ``gradient_allreduce`` never makes a step with gradients that were not averaged.

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
            ``asyncddp.algorithms.Algorithm``. ``adapt_then_combine``, the default, is the fastest
            on one machine and allows the larger steps; ``adapt_with_combine`` hides the time of
            messages and is the faster one where the network between machines is slow.
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
        self_weight, src_weights, dst_weights: Weights set by hand for neighbours; also under their
            older names ``neighbor_weights`` and ``send_neighbors``.
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
        self._wrapped = checked_optimizer(optimizer, DistributedOptimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        context, method = current(), checked_algorithm(algorithm)
        label = checked_prefix(window_prefix, method) or _label(context)
        self._mixer = Mixer(context, method, communication, topology, label)
        self._mixer.max_staleness = checked_staleness(max_staleness, method)
        self._mixer.windows.scales_steps = checked_scale_steps(scale_steps, method)
        models = checked_models(model)
        setting = Setting(
            self._mixer,
            optimizer,
            models,
            checked_steps(num_steps_per_communication),
            checked_cap(bucket_size_in_mb),
            training_of(context, models),
        )
        self._training = setting.training
        agree(context, facts_of(setting, update_in_backward))
        self._rhythm = rhythm_for(setting, update_in_backward=update_in_backward)
        take_over((parameter for _, parameter in self._rhythm.named), self._rhythm)
        if self._training is not None:
            self._training.listen()

    # what users hold

    self_weight = ByHand("self_weight")
    src_weights = ByHand("src_weights")
    dst_weights = ByHand("dst_weights")
    neighbor_weights = ByHand("src_weights")
    send_neighbors = ByHand("dst_weights")
    src_machine_weights = ByHand("src_machine_weights")
    dst_machine_weights = ByHand("dst_machine_weights")

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The user's own optimizer."""
        return self._wrapped

    @property
    def algorithm(self) -> str:
        """Name of the method."""
        return self._mixer.algorithm.name

    @property
    def communication(self) -> str:
        """Name of the kind of communication; may be set anew before any round, on all ranks."""
        return self._mixer.communication.name

    @communication.setter
    def communication(self, name: str) -> None:
        """Communicate by another one from the next round on."""
        self._mixer.choose(name)

    @property
    def round(self) -> int:
        """Averagings completed so far, which is the schedule's next round."""
        return self._mixer.round

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent to peers so far.

        A bucket counts once for each neighbour it is sent to; an allreduce of s bytes among n
        counts 2 (n - 1) / n s, what a ring sends, and halves are summed as float32.
        """
        return self._mixer.bytes_sent

    # what an optimizer does

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Give the wrapped optimizer other groups."""
        if self._made:
            self._wrapped.param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The wrapped optimizer's state."""
        return self._wrapped.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        """Give the wrapped optimizer another state."""
        if self._made:
            self._wrapped.state = state

    @property
    def _made(self) -> bool:
        return "_rhythm" in self.__dict__

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
        if not self._mixer.silent:
            self._mixer.context.engine.insist("DistributedOptimizer.step()")
        scaled = getattr(self, "found_inf", None) is not None
        if self._training is None:
            return self._rhythm.step(self._update, closure, scaled=scaled)
        result = self._rhythm.step(self._training.update(self._update), closure, scaled=scaled)
        self._training.step_ended()
        return result

    def synchronize(self) -> None:
        """Average the gradients that are not averaged yet, before they are clipped or unscaled.

        With ``gradient_allreduce`` gradients are averaged when the backward pass returns, and with
        ``num_steps_per_communication=J`` when the J-th returns. Where fewer passes were made, such
        as at the end of an epoch, ``step()`` averages what they have accumulated. This call does so
        at once, and ``step()`` does not repeat it. All ranks must call it. Without effect where
        gradients are averaged already, and with all other methods, which average parameters.

        Raises:
            PeerError: A peer failed, or does something else.
        """
        self._rhythm.synchronize()

    def _update(self, closure: Closure | None) -> Any:
        """Let the wrapped optimizer step, unless a GradScaler has found infinities."""
        if overflowed(self):
            return None
        unscale(self)
        return self._wrapped.step() if closure is None else self._wrapped.step(closure)

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimizer does."""
        self._wrapped.zero_grad(set_to_none)
        self._rhythm.zeroed()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model; all ranks must add the same.

        Args:
            param_group: As in ``torch.optim.Optimizer.add_param_group``.

        Raises:
            ArgumentError: A parameter belongs to none of the models.
        """
        if not self._made:
            return  # called by torch's constructor about groups that are there
        self._wrapped.add_param_group(param_group)
        try:
            self._rhythm.setting.trainable()
        except ArgumentError:
            self._wrapped.param_groups.pop()
            raise
        self._rhythm.settle()
        take_over(param_group["params"], self._rhythm)

    @property
    def counters(self) -> dict[str, int]:
        """Counts of this wrapper, rounds completed and passes since the last one."""
        return {"round": self._mixer.round, "passes": self._rhythm.passes.carried}

    @counters.setter
    def counters(self, counters: dict[str, int]) -> None:
        """Go on from other counts."""
        self._mixer.round = counters["round"]
        self._rhythm.passes.carried = counters["passes"]

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under ``"asyncddp"`` the counters of this wrapper."""
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

        Args:
            state_dict: What :meth:`state_dict` of this or of the wrapped optimizer gave.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._rhythm.forget()
        self._mixer.windows.restart()
        self._wrapped.load_state_dict({k: v for k, v in state_dict.items() if k != _KEY})
        self.counters = state_dict.get(_KEY, {"round": 0, "passes": 0})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getattr__(self, name: str) -> Any:
        """What only the wrapped optimizer has, such as ``train()`` of schedule-free ones."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._wrapped, name)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} belongs to a running world and cannot be copied or pickled; "
            "keep its state_dict() and wrap a new optimizer"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.algorithm}, {self.communication}, {self._wrapped!r})"


_labels: WeakKeyDictionary[Context, int] = WeakKeyDictionary()


def _label(context: Context) -> str:
    """A name for the next wrapper of a world, equal on all ranks that make them in one order."""
    number = _labels.get(context, 0)
    _labels[context] = number + 1
    return f"DistributedOptimizer{number}"
