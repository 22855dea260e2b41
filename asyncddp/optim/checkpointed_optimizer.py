"""Checkpoints of distributed optimizers: the wrapped optimizer's state and the averaging's."""

from __future__ import annotations

from typing import Any

from asyncddp.algorithms.phases import CommunicationPhase
from asyncddp.optim.algorithm_switch import AlgorithmSwitcher
from asyncddp.optim.optimizer_wrapper import TransparentOptimizerWrapper

_KEY = "asyncddp"


class CheckpointedOptimizer(TransparentOptimizerWrapper):
    """Base class of distributed optimizers, whose state says where the averaging stands."""

    _switcher: AlgorithmSwitcher

    @property
    def _phase(self) -> CommunicationPhase:
        return self._switcher.phase

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
        state[_KEY] = {**self.counters, **self._switcher.state_dict()}
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
        saved = state_dict.get(_KEY, {"round": 0, "passes": 0})
        if "steps" in saved:
            self._switcher.load_state_dict(saved)
        self.counters = saved
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
