"""Autotuner: times a distributed optimizer's steps with candidate settings and keeps the best."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from statistics import median
from typing import Any

import msgspec
import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.ops.object_collectives import gather_records
from asyncddp.optim.algorithm_switch import AlgorithmSwitcher
from asyncddp.optim.autotune import Autotune
from asyncddp.optim.autotune_candidates import SEARCHED, candidates_of, setting_of
from asyncddp.optim.autotune_result import (
    AutotuneResult,
    TriedSetting,
    TuningConditions,
    agree_on_place,
    brief,
    describe_place,
    text_of,
    versions,
    write_result,
)
from asyncddp.optim.step_timer import StepTimer
from asyncddp.optim.successive_halving import SuccessiveHalving, trials_of
from asyncddp.topology import GraphOrSchedule, as_schedule, describe

logger = logging.getLogger("asyncddp")
_PARTS = 2  # measurements of a trial


class Autotuner:
    """Search for the settings with the fastest steps of one distributed optimizer.

    ``DistributedOptimizer(..., autotune=True)`` creates one as its attribute ``autotune``. After
    each measurement the ranks exchange their measurements, and thus make the same decision. New
    settings are compared on all ranks before buckets are made.

    Attributes:
        result: Result of the search, on all ranks; None while the search is running.
    """

    def __init__(self, context: Context, switcher: AlgorithmSwitcher, autotune: Autotune) -> None:
        self._context, self._switcher, self._autotune = context, switcher, autotune
        named = switcher.phase.config.optimizer_parameters()
        parameters = [parameter for _, parameter in named]
        method = switcher.settings.create_method()
        self._candidates = candidates_of(switcher.settings, method, context, parameters)
        self._settings = [setting_of(candidate) for candidate in self._candidates]
        given = self._topology
        topology = "none" if given is None else describe(given)
        self._index, self._installed = 0, switcher.settings
        self._place = describe_place(
            context, switcher.settings.describe(("autotune", *SEARCHED)), topology, named
        )
        self._search = SuccessiveHalving(len(self._candidates))
        self._trials = trials_of(len(self._candidates))
        self._timer = StepTimer(parameters[0].device if parameters else torch.device("cpu"))
        self._skip, self._steps, self._period = autotune.warmup_steps, 1, 1
        self.result: AutotuneResult | None = None
        self._begin()

    @property
    def done(self) -> bool:
        """True when the search is over."""
        return self.result is not None

    @property
    def _topology(self) -> GraphOrSchedule | None:
        averager = self._switcher.averager
        return averager.topology_in_use(averager.topology)

    def _begin(self) -> None:
        """Take the result from the file if it fits; otherwise begin to search."""
        if self._context.size == 1 or self._switcher.averager.communication.how is None:
            self._end(0, "nothing is sent, so that there is nothing to try")
            return
        self._place, found = agree_on_place(self._context, self._place, self._autotune.path)
        if len(self._candidates) == 1:
            self._end(0, "there is but one candidate")
        elif found is not None and not (reason := self._misfit(found)):
            self._search.seconds = [one.seconds for one in found.tried]
            self._end(self._settings.index(found.setting), found.origin)
        else:
            why = f"; {self._autotune.path} is of something else: {reason}" if found else ""
            self._inform(
                "%d candidates, %d trials of %d steps at least%s",
                len(self._candidates),
                self._trials,
                self._autotune.steps_per_trial,
                why,
            )

    def _misfit(self, found: AutotuneResult) -> str:
        """Explain why a saved result cannot be used here; empty if it can."""
        if reason := self._place.differences(found.measured_on):
            return reason
        if [one.setting for one in found.tried] != self._settings:
            return "it was chosen among other candidates"
        measured = [one.setting for one in found.tried if one.seconds and min(one.seconds) > 0]
        return "" if found.setting in measured else "it has not measured what it has chosen"

    # the search

    def end_step(self) -> None:
        """Record the end of a step; collective if it ends a measurement."""
        if self.done or self._switcher.warming_up:
            return
        self._skip -= 1
        if self._skip <= 0:
            self._mark()
            if len(self._timer) >= self._steps:
                self._end_measurement()

    def _mark(self) -> None:
        """Mark the end of a step, which is the start of the next measured step."""
        if not self._timer.started:
            self._period = self._steps_that_repeat()
            each = _PARTS * self._period
            self._steps = self._period * -(-self._autotune.steps_per_trial // each)
        self._timer.mark()

    def _steps_that_repeat(self) -> int:
        """Return the period, in steps, of averaging and of its neighbours."""
        steps, given = self._switcher.phase.accumulation.passes_per_round, self._topology
        rounds = None if given is None else as_schedule(given).period
        together = steps * (rounds or 1)
        return together if together <= self._autotune.steps_per_trial else steps

    def _end_measurement(self) -> None:
        """Exchange the measurements, and continue with the next candidate."""
        period, steps = self._period, self._timer.durations()
        sums = [sum(steps[k : k + period]) for k in range(0, len(steps), period)]
        with use(self._context):
            every = gather_records(median(sums) / period, float, "autotune")
        before = self._search.current or 0
        self._search.record(max(every))
        following = self._search.current
        self._inform(
            "measurement %d of %d: %.3g ms a step by %s",
            self._search.measurements,
            _PARTS * self._trials,
            1e3 * max(every),
            brief(self._settings[before]),
        )
        if following is None:
            self._end(self._search.best, f"{self._trials} trials")
            self._publish()
        else:
            self._measure(following, anew=following != before)

    def _measure(self, index: int, *, anew: bool) -> None:
        """Begin to measure a candidate; ``anew`` if other settings were in use before."""
        self._install(index)
        self._timer.clear()
        self._skip = self._autotune.warmup_steps if anew else 0
        if not self._skip:
            self._mark()

    def _install(self, index: int) -> None:
        """Make the optimizer use a candidate's settings; collective."""
        if index != self._index:
            self._switcher.rebuild(self._candidates[index])
            self._index, self._installed = index, self._switcher.settings

    def _end(self, best: int, origin: str) -> None:
        self._timer.clear()
        self._install(best)
        setting = self._settings[best]
        self.result = AutotuneResult(setting, self._tried(), self._place, versions(), origin)
        self._inform("%s: %s", origin, brief(setting))

    def _tried(self) -> list[TriedSetting]:
        pairs = zip(self._settings, self._search.seconds, strict=True)
        return [TriedSetting(setting, list(seconds)) for setting, seconds in pairs]

    def _publish(self) -> None:
        """Save and print the result on rank 0."""
        if self._context.rank != 0 or self.result is None:
            return
        if self._autotune.path is not None:
            write_result(self._autotune.path, self.result)
        if self._autotune.show:
            sys.stderr.write(self.report())

    def _inform(self, message: str, *args: object) -> None:
        if self._context.rank == 0:
            logger.info("autotune: " + message, *args)

    def report(self) -> str:
        """Return a table of the tried settings, the chosen one first."""
        tried = self._tried()
        if self.result is None:
            made = self._search.measurements / _PARTS
            return text_of(tried, None, f"autotune: {made:g} of {self._trials} trials")
        chosen = self._settings.index(self.result.setting)
        return text_of(tried, chosen, f"autotune: {self.result.origin}")

    # checkpoints

    def state_dict(self) -> dict[str, Any] | None:
        """Return the search state as plain values; None if another algorithm is in use."""
        if self._switcher.settings is not self._installed:
            return None
        return {
            "place": msgspec.to_builtins(self._place),
            "candidates": self._settings,
            "search": {"seconds": [list(one) for one in self._search.seconds]},
            "origin": None if self.result is None else self.result.origin,
            "chosen": self._index,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue a saved search, or adopt its chosen settings; collective.

        A search on other ranks, machines, models or among other candidates counts for nothing.
        """
        if self._switcher.settings is not self._installed:
            return
        place = msgspec.convert(saved["place"], TuningConditions)
        if (reason := self._place.differences(place)) or saved["candidates"] != self._settings:
            self._inform("the saved search does not count: %s", reason or "it had other candidates")
            return
        self._search = SuccessiveHalving(len(self._candidates))
        self._search.replay(saved["search"]["seconds"])
        self.result = None
        if saved["origin"] is not None:
            self._end(saved["chosen"], saved["origin"])
        else:
            self._measure(self._search.current or 0, anew=True)
