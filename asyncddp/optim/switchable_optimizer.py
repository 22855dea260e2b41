"""Base class of distributed optimizers, whose algorithm can be switched, paused and saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from asyncddp.algorithms import Algorithm
from asyncddp.algorithms.phases import CommunicationPhase
from asyncddp.errors import UsageError
from asyncddp.optim.algorithm_switch import AlgorithmSwitcher, inherited
from asyncddp.optim.autotuner import Autotuner
from asyncddp.optim.optimizer_wrapper import TransparentOptimizerWrapper

_KEY = "asyncddp"


class SwitchableOptimizer(TransparentOptimizerWrapper):
    """Base class of distributed optimizers, whose algorithm can be switched, paused and saved."""

    _switcher: AlgorithmSwitcher
    _autotuner: Autotuner | None = None
    _closed = False

    @property
    def autotune(self) -> Autotuner | None:
        """Search for the fastest settings, with its ``result``; None without autotuning."""
        return self._autotuner

    @property
    def _phase(self) -> CommunicationPhase:
        return self._switcher.phase

    def _before_update(self) -> None:
        self._phase.before_update()

    def switch_to(
        self,
        algorithm: str | type[Algorithm],
        *,
        replicas: str = "average",
        **arguments: Any,
    ) -> None:
        r"""Train with another algorithm from the next step on; collective, between two steps.

        Running operations end first, and the ranks' models are made equal. The optimizer keeps its
        state; buckets, hooks and windows are created again.

        Args:
            algorithm: As for the constructor.
            replicas: What becomes of models that differ: ``"average"`` replaces parameters and
                floating-point buffers by their averages over ranks and takes other buffers from
                rank 0, ``"rank0"`` takes all from rank 0, ``"keep"`` leaves them, for algorithms
                that let them differ.
            **arguments: The constructor's other arguments, and options of the algorithm, which
                have their defaults otherwise; the size of buckets stays.

        Raises:
            UnknownNameError: No algorithm has that name.
            ArgumentError: An argument that cannot be.
            UsageError: Inside ``join``, or before the end of autotuning.
            MismatchError: Ranks ask for different things, or after different steps.

        Example:
            >>> import asyncddp as bf, torch
            >>> def train():
            ...     model = torch.nn.Linear(1, 1, bias=False)
            ...     torch.nn.init.constant_(model.weight, bf.rank())
            ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            ...     alone = {"communication": "empty", "broadcast": False}
            ...     optimizer = bf.DistributedOptimizer(optimizer, model, **alone)
            ...     optimizer.switch_to("gradient_allreduce")
            ...     return optimizer.algorithm, model.weight.item()
            >>> with bf.local_world(2) as world:
            ...     world.run(train)
            [('gradient_allreduce', 0.5), ('gradient_allreduce', 0.5)]
        """
        if self._autotuner is not None and not self._autotuner.done:
            raise UsageError(
                "switch_to: autotuning is under way, whose candidates are of one algorithm; switch "
                "once optimizer.autotune.done is True, or make the optimizer without autotune"
            )
        settings = inherited(self._switcher.settings, algorithm, arguments)
        self._switcher.switch(settings, replicas)

    def abort(self) -> None:
        """Stop averaging at fixed time intervals, once all ranks have called it; collective.

        For ``async_model_average`` with ``sync_interval_ms``: rounds continue until the last rank
        calls it, and all ranks stop after the same round. Then no message is in flight, and only
        steps change parameters. Without effect if already stopped, or with other algorithms.

        Raises:
            PeerError: A rank failed, or did not call it by the deadline.
        """
        self._phase.abort()

    def resume(self) -> None:
        """Resume averaging at fixed time intervals after :meth:`abort`; all ranks call it."""
        self._phase.resume()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in the ``with`` block: its backward passes are not counted.

        So the pass that follows, with its step, is one, however many were made before.
        """
        counter = self._phase.accumulation
        before, counter.held = counter.held, True
        try:
            yield
        finally:
            counter.held = before
            counter.forget()

    def close(self) -> None:
        """End running operations, free the windows and remove all hooks; collective.

        The state can be saved after it, and the model trained by another wrapper.

        Raises:
            WaitTimeoutError: A rank has not come by the deadline.
        """
        if not self._closed:
            self._closed = True
            self._switcher.end_phase()
            self._switcher.too_few_rounds.tell()

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of completed rounds, and of backward passes since the last round."""
        return {"round": self._averager.round, "passes": self._phase.accumulation.carried_passes}

    @counters.setter
    def counters(self, counters: dict[str, int]) -> None:
        self._averager.round = self._phase.round_to_resume(counters["round"])
        self._phase.accumulation.carried_passes = counters["passes"]

    @property
    def averaging_state(self) -> dict[str, Any]:
        """State of the averaging: counters, current algorithm and the algorithm's state."""
        self._phase.settle()
        state = {**self.counters, **self._switcher.state_dict()}
        search = None if self._autotuner is None else self._autotuner.state_dict()
        return state if search is None else {**state, "autotune": search}

    @averaging_state.setter
    def averaging_state(self, saved: dict[str, Any]) -> None:
        if self._autotuner is not None and "autotune" in saved:
            self._autotuner.load_state_dict(saved["autotune"])
        self._switcher.load_state_dict(saved)
        self.counters = {"round": 0, "passes": self._phase.config.first_carried_passes, **saved}

    def method_after_loading(self, averaging_state: Mapping[str, Any]) -> str:
        """Return the name of the method used after loading an :attr:`averaging_state`."""
        return self._switcher.method_after_loading(averaging_state)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with this wrapper's counters in ``"asyncddp"``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = dict(self._wrapped.state_dict())
        state[_KEY] = self.averaging_state
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; a plain optimizer's state resets the counters.

        All ranks have to load, since methods are built anew where another one was in use then.
        With one-sided methods what neighbours have published before is forgotten, and push-sum goes
        on from the de-biased parameters with p = 1; so load on all ranks between two barriers, or
        before the first step. Of autotuning, what was found so far counts, on all ranks alike.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._phase.reset()
        self._averager.windows.reset()
        self._wrapped.load_state_dict({k: v for k, v in state_dict.items() if k != _KEY})
        self.averaging_state = state_dict.get(_KEY, {})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
