"""Synchronous simulation of one algorithm on all ranks: buckets, rounds, and order of a step.

Each communication timing is an order of the same parts of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.method_traits import AveragedQuantity, CommunicationTiming
from asyncddp.algorithms.phases.accumulation_counter import AccumulationCounter
from asyncddp.algorithms.wrapper_setup import checked_bucket_bytes
from asyncddp.compression import Compressor
from asyncddp.optim.method_settings import MethodSettings
from asyncddp.simulate.averaging import (
    AveragingScheme,
    GlobalAveraging,
    NeighborAveraging,
    NoAveraging,
    Traffic,
)
from asyncddp.simulate.machine_averaging import LeaderAveraging
from asyncddp.simulate.method_checks import ViewSchedules, averaging_of
from asyncddp.simulate.record import SimulatedRanks
from asyncddp.simulate.scenario import Lives, Mask
from asyncddp.simulate.simulated_bucket import SimulatedBucket
from asyncddp.simulate.stacked_model import ParameterCopies, Scale, StackedModel
from asyncddp.tensors.allocation import zeros
from asyncddp.tensors.buckets import NamedFlatBucket, partition


class MethodRun:
    """Simulated run of one algorithm, in which all ranks make their steps together.

    Args:
        ranks: The ranks.
        settings: The method, and what is averaged with whom.
        method: What ``settings.create_method()`` gave.
        begun: Steps that the ranks have made before.

    Raises:
        ArgumentError: The method, or an argument of it, is none that can be simulated.
        TopologyError: The method does not work on the graph, or it has another number of ranks.
    """

    def __init__(
        self, ranks: SimulatedRanks, settings: MethodSettings, method: Algorithm, begun: int
    ) -> None:
        model, scenario = ranks.model, ranks.scenario
        self._ranks, self.method, self.model, self.optimizer = ranks, method, model, ranks.optimizer
        kind = averaging_of(settings, method, scenario, model.ranks)
        kind = kind if model.ranks > 1 else NoAveraging
        self._idle = model.ranks == 1 and not method.changes_alone
        self._parts = _STEPS[method.when]
        self._hidden = method.when in _HIDDEN or method.delay > 0
        self._bucket_bytes = checked_bucket_bytes(settings.bucket_size_in_mb)
        self._local = scenario.ranks_per_machine
        self._counter = round_counter(settings, method)
        self._views: ViewSchedules | None = None
        self._view = self._last = scenario.view(model.ranks, begun)
        if issubclass(kind, NeighborAveraging):
            machines = model.ranks // self._local if kind.of_machines else None
            self._views = ViewSchedules(settings, method, scenario, model.ranks, machines)
        schedule = None if self._views is None else self._views.among(self._view > 0)
        self.averaging: AveragingScheme = kind(method, model.ranks, schedule, scenario)
        self._over_all = GlobalAveraging(method, model.ranks, None, scenario)
        compressor = settings.compressor_for(method)
        self._copies, self._copied = ParameterCopies(model, method), False
        places = [] if self._idle else self._places()
        self.buckets = [self._bucket(place, compressor) for place in places]
        self._rounds = 0
        self._active: Mask = scenario.active(model.ranks, begun)
        self._traffic: Traffic | None = None
        self._behind: Traffic | None = None  # of a hidden round

    def _places(self) -> list[tuple[int, NamedFlatBucket, torch.Tensor]]:
        """Return number, layout and stacked tensor of each averaged bucket."""
        model, method = self.model, self.method
        if method.what is not AveragedQuantity.PARAMETER:
            return gradient_places(model, self._bucket_bytes)
        pairs = zip(model.layouts, self._copies.averaged_flats, strict=True)
        return [(k, *pair) for k, pair in enumerate(pairs)]

    def _bucket(
        self, place: tuple[int, NamedFlatBucket, torch.Tensor], compressor: Compressor | None
    ) -> SimulatedBucket:
        number, layout, flat = place
        whole, local = None, self._local
        if isinstance(self.averaging, LeaderAveraging):
            whole, flat = flat, flat[::local]
        bucket = AveragedBucket(number, flat, layout, self.optimizer.groups)
        bucket.parameters = [self.model.parameters[name] for name in layout.names]
        first = (
            self.averaging.round_of(0) if isinstance(self.averaging, NeighborAveraging) else None
        )
        return SimulatedBucket(self.method, bucket, layout, compressor, first, whole)

    def advance(self, step: int) -> None:
        """Make step number ``step`` on all ranks; the first step is 1.

        Ranks that have left keep their parameters, and send nothing.
        """
        ranks, count, self._traffic = self._ranks, self.model.ranks, None
        self._step = step - 1
        active = self._active = ranks.scenario.active(count, step - 1)
        self._admit(ranks.scenario.arriving(count, step - 1))
        self._batch = ranks.batches.of(range(count), [step - 1] * count)
        gone = np.flatnonzero(~active).tolist()
        before = [flat[gone] for flat in self.model.flats] if gone else []
        self._due = self._counter.due()
        for part in self._parts:
            part(self)
        if not self._idle:
            for one in self._each_bucket():
                one.steps = 0 if self._due else one.steps + 1
            self._call(self.method.after_step)
        for flat, old in zip(self.model.flats, before, strict=bool(gone)):
            flat[gone] = old
        self.optimizer.end_step()
        self._counter.end(averaged=self._due)
        ranks.clocks.advance(self._traffic, active, hidden=self._hidden)
        if self._behind is not None:
            ranks.clocks.count(self._behind)
            self._behind = None
        ranks.recorder.add_losses(self._losses[np.flatnonzero(active).tolist()])

    def _admit(self, sponsors: Mapping[int, int]) -> None:
        """Give ranks that arrive the model and state of their sponsors."""
        if not sponsors:
            return
        with torch.no_grad():
            self.model.admit(sponsors, self._copies)
            self.optimizer.admit(sponsors)
            for bucket in self.buckets:
                bucket.admit(sponsors)
        self._ranks.clocks.admit(sponsors, self.model.nbytes)

    def record(self, step: int) -> None:
        """Record the current measurements of the ranks that are still in the run."""
        ranks, there = self._ranks, np.flatnonzero(self._active).tolist()
        seconds, sent = ranks.clocks.now[there].max(), ranks.clocks.bytes_sent[there].mean()
        made = ranks.steps_made(step)
        ranks.recorder.record(step, float(seconds), float(sent), there, made)

    def compute_gradients(self) -> None:
        """Compute gradients and losses of all ranks, each at its own parameters."""
        self._losses = self.model.gradients(self._batch)

    def update(self) -> None:
        """Run the method's hook on the gradients, and then the optimizer's step."""
        if self.method.replaces_gradients and not self._idle:
            self._call(self.method.before_update)
        self.optimizer.step()

    def _call(self, hook: Callable[[AveragedBucket], None]) -> None:
        with torch.no_grad():
            for one in self._each_bucket():
                hook(one)

    def _each_bucket(self) -> Iterator[AveragedBucket]:
        """Yield the buckets whose hooks run one after the other."""
        return (one for bucket in self.buckets for one in bucket.each)

    def average_if_due(self) -> None:
        """Average all buckets if a round ends with this step."""
        if self._due and not self._idle:
            with self._copies.averaged():
                self._average()
                if self.method.hidden_rounds:
                    blocking = self._traffic
                    self._average()
                    self._behind, self._traffic = self._traffic, blocking
            self._copied = False

    def _average(self) -> None:
        """Average all buckets in one round."""
        averaging = self.averaging
        if isinstance(averaging, NeighborAveraging) and self.method.averages_all(self._rounds):
            averaging = self._over_all
        scenario, count = self._ranks.scenario, self.model.ranks
        stays = scenario.stays(count, self._step)
        self._enter(scenario.view(count, self._step))
        averaging.begin(self._rounds, stays, scenario.alive(count, self._step))
        self._restart(np.where(stays, self._view, 0), averaging)
        for bucket in self.buckets:
            bucket.begin_round(self._rounds, self._active)
        taking_part = [one for one in self.buckets if self.method.takes_part(one.each[0])]
        with torch.no_grad():
            nbytes = sum(averaging.average(bucket) for bucket in taking_part)
        averaging.end()
        self._rounds += 1
        if not isinstance(averaging, NoAveraging):
            self._traffic = averaging.traffic(nbytes)

    def _enter(self, view: Lives) -> None:
        """Enter the view of a round, if it is another one; push-sum weights begin anew."""
        if (view != self._view).any():
            self._view = view
            self.scale_by_bias(torch.Tensor.div_)
            self.averaging.enter(None if self._views is None else self._views.among(view > 0))

    def _restart(self, taking_part: Lives, averaging: AveragingScheme) -> None:
        """Restart the method's state if others take part than in the last round."""
        if isinstance(averaging, NoAveraging) or (taking_part == self._last).all():
            return
        new, nodes = np.flatnonzero(taking_part > self._last), int((self._view > 0).sum())
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.restart(averaging.planned, averaging.mixing, new.tolist(), nodes)
        self._last = taking_part

    def average_gradients(self) -> None:
        """Average the gradients, or the tensors that the method sends instead."""
        if self._idle:
            return
        with torch.no_grad():
            for bucket in (one.bucket for one in self.buckets):
                bucket.tail.fill_(1.0)  # every parameter has a gradient
                views = bucket.views_of(bucket.flat)
                for parameter, view in zip(bucket.parameters, views, strict=True):
                    assert parameter.grad is not None
                    view.copy_(parameter.grad)
                    parameter.grad = view
            self._average()

    def copy_parameters(self) -> None:
        """Copy the parameters in the first step after an averaging."""
        if not self._copied and not self._idle:
            self._copied = True
            self._copies.take()

    def scale_by_bias(self, by: Scale) -> None:
        """Multiply or divide all parameters by their rank's push-sum weight, if there is one."""
        if self.averaging.biases is not None:
            self.model.scale(by, self.averaging.biases)


_GRADIENTS, _UPDATE = MethodRun.compute_gradients, MethodRun.update
_AVERAGE, _AVERAGE_GRADIENTS = MethodRun.average_if_due, MethodRun.average_gradients
_BIAS = partial(MethodRun.scale_by_bias, by=torch.Tensor.mul_)
_UNBIAS = partial(MethodRun.scale_by_bias, by=torch.Tensor.div_)
_COPY = MethodRun.copy_parameters
_STEPS: dict[CommunicationTiming, Sequence[Callable[[MethodRun], None]]] = {
    CommunicationTiming.AFTER_STEP: (_GRADIENTS, _UPDATE, _AVERAGE),
    CommunicationTiming.AFTER_BIASED_STEP: (_GRADIENTS, _BIAS, _UPDATE, _AVERAGE, _UNBIAS),
    CommunicationTiming.BEFORE_FORWARD: (_GRADIENTS, _AVERAGE, _UPDATE),
    CommunicationTiming.GRADIENT_READY: (_GRADIENTS, _AVERAGE_GRADIENTS, _UPDATE),
    CommunicationTiming.THROUGH_STEP: (_COPY, _GRADIENTS, _UPDATE, _AVERAGE),
}
"""The parts of a step in their order; gradients that are averaged are so in each step."""
_HIDDEN = {CommunicationTiming.BEFORE_FORWARD, CommunicationTiming.THROUGH_STEP}


def round_counter(settings: MethodSettings, method: Algorithm) -> AccumulationCounter:
    """Make the same step counter as on real ranks, which says when an averaging is due."""
    counter = AccumulationCounter(settings.steps_per_round(method), counts_steps=True)
    if method.communication_interval is not None and method.averages_first_step:
        counter.carried_passes = counter.passes_per_round - 1
    return counter


def gradient_places(
    model: StackedModel, bucket_bytes: int
) -> list[tuple[int, NamedFlatBucket, torch.Tensor]]:
    """Lay out gradients as on real ranks: in reverse order, with a flag per parameter."""
    named = [
        pair
        for layout in model.layouts
        for pair in zip(layout.names, layout.parameters, strict=True)
    ]
    order = {name: number for number, name in enumerate(model.parameters)}
    backwards = sorted(named, key=lambda pair: -order[pair[0]])
    places = []
    for number, part in enumerate(partition([one for _, one in backwards], bucket_bytes)):
        layout = NamedFlatBucket([backwards[index] for index in part], extra=len(part))
        one = layout.flat
        places.append((number, layout, zeros((model.ranks, one.numel()), one.dtype, one.device)))
    return places
