"""Switching of a distributed optimizer's algorithm between steps, on demand or by a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncddp.algorithms import Algorithm, AveragedQuantity
from asyncddp.algorithms.gradient_hooks import claim_parameters
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.phases import CommunicationPhase
from asyncddp.algorithms.training_tracer import NullTrainingTracer
from asyncddp.algorithms.wrapper_setup import checked_choice, checked_integer
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError, AsyncDDPError, UsageError
from asyncddp.ops.settings_agreement import require_equal_on_all_ranks
from asyncddp.optim.method_settings import MethodSettings, set_gradient_meaning
from asyncddp.optim.replica_synchronization import POLICIES, unify_replicas, unify_state
from asyncddp.optim.too_few_rounds import RoundsWarning
from asyncddp.topology import TopologyError

WRAPPER = "DistributedOptimizer"
_SWITCH_AT = "argument switch_at", "step", 1, "{1000: 'decentralized'} from steps to algorithms"
SwitchSchedule = Mapping[
    int, str | type[Algorithm] | tuple[str | type[Algorithm], Mapping[str, Any]]
]
"""By the number of completed steps: the algorithm to switch to, or that and its arguments."""


def schedule_entries(
    argument: str, unit: str, least: int, example: str, given: Any
) -> dict[int, tuple[str | type[Algorithm], dict[str, Any]]]:
    """Check a schedule of algorithms, and return each with its arguments, by step or epoch."""
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{argument}: expected a mapping such as {example}, got {given!r}")
    found = {}
    for key, entry in given.items():
        algorithm, arguments = entry if isinstance(entry, tuple) else (entry, {})
        found[checked_integer(f"{argument}: {unit}", key, least)] = algorithm, dict(arguments)
    return found


class AlgorithmSwitcher:
    """Switcher of a distributed optimizer's algorithm, with a schedule of later algorithms.

    Attributes:
        steps: Steps that the wrapper has completed.
        settings: Settings of the current method, which may still be in its warm-up.
        phase: The communication phase in use.
        warming_up: True during the warm-up of the method.
        too_few_rounds: Warns, in the end, of a method that has hardly averaged.
    """

    phase: CommunicationPhase

    def __init__(
        self,
        context: Context,
        optimizer: torch.optim.Optimizer,
        models: Sequence[torch.nn.Module],
        tracer: NullTrainingTracer,
        settings: MethodSettings,
        schedule: SwitchSchedule | None,
        *,
        broadcast: bool,
    ) -> None:
        self._context, self._optimizer, self._models = context, optimizer, models
        self._tracer = tracer
        self.steps = 0
        self._first, self._schedule = settings, self._checked_schedule(settings, schedule)
        self._by_hand = False
        self.too_few_rounds = RoundsWarning()
        context.exit_callbacks.append(self.too_few_rounds.tell)
        self._begin(settings, since=0, broadcast=broadcast)

    @property
    def averager(self) -> ModelAverager:
        """The averager in use."""
        return self.phase.config.averager

    def _checked_schedule(
        self, settings: MethodSettings, schedule: SwitchSchedule | None
    ) -> dict[int, MethodSettings]:
        """Check the argument switch_at, and return the settings keyed by step."""
        found: dict[int, MethodSettings] = {}
        entries = {} if schedule is None else schedule_entries(*_SWITCH_AT, schedule)
        for step, (algorithm, arguments) in entries.items():
            found[step] = inherited(settings, algorithm, arguments)
            _refuse_search(found[step])
            found[step].check(self._context, self._optimizer)
        if found and settings.autotune is not None:
            raise ArgumentError(
                "argument autotune: the search is for the settings of one algorithm, which "
                "switch_at would end; expected autotune=False, or call switch_to() when the "
                "search is over"
            )
        return found

    def _begin(self, settings: MethodSettings, *, since: int, broadcast: bool = False) -> None:
        """Build the phase of a method, or of its warm-up, for a method in use since a step."""
        self.settings, self._since = settings, since
        self._method = method = settings.create_method()
        method.check_optimizer(self._optimizer)
        set_gradient_meaning(method, self._optimizer, averages=self._context.size > 1)
        self.warming_up = self._warms_up()
        if self.warming_up:
            settings.check(self._context, self._optimizer)
            settings = settings.before(method)
            method = settings.create_method()
        before = self.averager if hasattr(self, "phase") else None
        parts = self._context, method, self._optimizer, self._models, self._tracer, WRAPPER
        self.phase = settings.build_phase(*parts, broadcast=broadcast)
        if before is not None:
            self.averager.continue_totals(before)
        self.too_few_rounds.begin(self.phase.config, since)
        claim_parameters(self.phase.parameters(), self.phase)

    def rebuild(self, settings: MethodSettings) -> None:
        """Continue with other settings of the same method; collective, between two steps.

        Replicas, counters, the method's state and weights set by hand are kept. So is the state of
        compressors whose buckets contain the same parameters as before.
        """
        used, before = settings, self.settings
        if self.warming_up:
            used, before = settings.before(self._method), before.before(self._method)
        self.end_phase()
        self.phase = used.rebuild_phase(self.phase, before, WRAPPER)
        if self._first is self.settings:
            self._first = settings
        self.settings = settings
        claim_parameters(self.phase.parameters(), self.phase)

    def _warms_up(self) -> bool:
        return self._method.warms_up(self._optimizer, self.steps - self._since)

    def start_at(self, steps: int) -> None:
        """Set the step count to a number of steps made before."""
        self.steps = self._since = steps

    def end_step(self) -> None:
        """Count a step, and switch if the schedule or the end of a warm-up requires it."""
        self.steps += 1
        self.too_few_rounds.count(self.steps, self.averager.round)
        following = self._schedule.get(self.steps)
        if following is not None:
            self._by_hand = False
            self._replace(following, "average")
        elif self.warming_up and not self._warms_up():
            self._end_warmup()

    def _end_warmup(self) -> None:
        """Replace the warm-up's phase by the method's own; all ranks hold equal models."""
        self._refuse_in_join(f"the warm-up of {self._method.name} ends")
        self.end_phase()
        self._begin(self.settings, since=self._since)
        self.too_few_rounds.begin(self.phase.config, self.steps)

    def switch(self, settings: MethodSettings, replicas: str) -> None:
        """Check that all ranks request the same switch, and perform it; collective."""
        self._refuse_in_join("switch_to was called")
        method = self.averager.algorithm
        require_equal_switch(self._context, self._optimizer, method, settings, replicas, self.steps)
        self._replace(settings, replicas)
        self._by_hand = True

    def _replace(self, settings: MethodSettings, replicas: str) -> None:
        """End the current method, unify the replicas, and begin another method."""
        self._refuse_in_join(f"a switch to {settings.method_name} is due")
        before = self.averager
        self.end_phase()
        with use(self._context):
            unify_replicas(self._models, replicas)
            if settings.create_method().what is AveragedQuantity.MOMENTUM:
                unify_state(self._optimizer, replicas)
        self._begin(settings, since=self.steps)
        after = self.averager
        alike = before.communication is after.communication
        alike = alike and before.algorithm.what is after.algorithm.what
        if alike and before.compressor == after.compressor and before.compressor is not None:
            saved = before.state_dict()
            after.load_state_dict({"parameters": {}, "compressors": saved["compressors"]})

    def _refuse_in_join(self, what: str) -> None:
        if self.averager.join_coordinator is not None:
            raise UsageError(
                f"{WRAPPER}: {what} after step {self.steps}, inside join, where ranks make "
                "different numbers of steps; switch before or after the block"
            )

    def end_phase(self) -> None:
        """End running operations, free the windows and remove the hooks; collective."""
        self.phase.close()
        self.phase.detach()

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the current method, its first step, and its state."""
        return {
            "steps": self.steps,
            "since": self._since,
            "algorithm": self._method.name,
            **self.averager.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a state; collective if another method was in use.

        The wrapped optimizer's state is loaded before. Without ``"steps"`` nothing else is loaded.
        Without ``"parameters"`` all ranks restart the method's state from their models.
        """
        settings, since = self.settings, self._since
        if "steps" in saved:
            self.steps, since = saved["steps"], saved["since"]
            settings = self._settings_of(saved)
        self._since = since
        if settings is not self.settings or self.warming_up != self._warms_up():
            self.end_phase()
            self._begin(settings, since=since)
        set_gradient_meaning(self._method, self._optimizer, averages=self._context.size > 1)
        if "steps" not in saved:
            return
        if "parameters" not in saved:
            self.averager.begin_state()
            return
        if saved["parameters"] and saved["algorithm"] != self._method.name:
            raise ArgumentError(
                f"load_state_dict: the state is of {saved['algorithm']}, but {self._method.name} "
                f"is in use; call switch_to({saved['algorithm']!r}) before, or give switch_at"
            )
        self.averager.load_state_dict(saved)

    def method_after_loading(self, saved: Mapping[str, Any]) -> str:
        """Return the name of the method to be used after loading a state."""
        return self._settings_of(saved).method_name

    def _settings_of(self, saved: Mapping[str, Any]) -> MethodSettings:
        """Return the settings to use after loading a state: scheduled or set by hand."""
        algorithm = saved["algorithm"]
        due = [step for step in self._schedule if step <= saved["steps"]]
        scheduled = self._schedule[max(due)] if due else self._first
        order = (self.settings, scheduled) if self._by_hand else (scheduled, self.settings)
        return next((one for one in order if one.method_name == algorithm), order[0])


def require_equal_switch(
    context: Context,
    optimizer: torch.optim.Optimizer,
    before: Algorithm,
    settings: MethodSettings,
    replicas: str,
    steps: int,
) -> None:
    """Raise an error on all ranks unless all request the same, valid switch.

    Collective even if this rank's arguments are wrong, so that all ranks raise.
    """
    problem: AsyncDDPError | TopologyError | None = None
    try:
        method = settings.check(context, optimizer)
        _refuse_search(settings)
        checked_choice("argument replicas", replicas, POLICIES)
        if replicas == "keep" and method.replicates_model and not before.replicates_model:
            raise ArgumentError(
                f"switch_to: argument replicas: {before.name} has let the ranks' models differ, "
                f"and {method.name} would keep them so; expected 'average' or 'rank0', got 'keep'"
            )
    except (AsyncDDPError, TopologyError) as error:
        problem = error
    asked = f"{settings.describe()} and replicas={replicas!r}"
    facts = [asked if problem is None else f"an error: {problem}", f"step {steps}"]
    try:
        require_equal_on_all_ranks(
            context, "switch_to needs the same arguments on all ranks", facts
        )
    finally:
        if problem is not None:
            raise problem


def _refuse_search(settings: MethodSettings) -> None:
    if settings.autotune:
        raise ArgumentError(
            "argument autotune: a switch begins no search; expected it where the wrapper is made, "
            f"got {settings.autotune!r}"
        )


def inherited(
    settings: MethodSettings, algorithm: str | type[Algorithm], arguments: Mapping[str, Any]
) -> MethodSettings:
    """Return settings for another algorithm, with the bucket size of the current settings."""
    return MethodSettings.of(
        algorithm, {"bucket_size_in_mb": settings.bucket_size_in_mb, **arguments}
    )
