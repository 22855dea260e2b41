"""Event-driven simulation of one algorithm on asynchronous ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from asyncddp.algorithms.averaged_bucket import AveragedBucket, ReceivedAverage
from asyncddp.algorithms.method_traits import CommunicationTiming
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.algorithms.step_rate_estimator import step_scale
from asyncddp.optim.distributed_optimizer_arguments import checked_scale_steps, checked_staleness
from asyncddp.optim.method_settings import MethodSettings
from asyncddp.simulate.asynchronous_exchange import EXCHANGES
from asyncddp.simulate.events import EventQueue, SimulatedNetwork
from asyncddp.simulate.method_checks import (
    asynchronous_communication,
    check_asynchronous,
    checked_topology,
)
from asyncddp.simulate.method_run import round_counter
from asyncddp.simulate.record import SimulatedRanks
from asyncddp.simulate.scenario import Scenario
from asyncddp.simulate.stacked_model import ParameterCopies, Scale
from asyncddp.tensors.allocation import detached_copy, make_tensor


class AsynchronousRun:
    r"""Simulated run of one algorithm, in which each rank makes its steps at its own pace.

    A step of rank i begins at :math:`t`, when it publishes its tensors, and ends at
    :math:`t + c_i`, when it averages with the tensors received by then. The next step begins at
    once, unless ``max_staleness`` makes the rank wait.

    Args:
        simulated: The ranks, with an optimizer each.
        settings: The method, and what is averaged with whom.
        steps: Steps that the ranks make on average, with those of the warm-up.
        begun: Steps that they have made together, before each goes on at its own pace.

    Attributes:
        steps: Steps that each rank has made.
        queue: The events.

    Raises:
        ArgumentError: The method, or an argument of it, is none that can be simulated so.
        TopologyError: The method does not work on the graph, or it has another number of ranks.
    """

    def __init__(
        self, simulated: SimulatedRanks, settings: MethodSettings, steps: int, begun: int
    ) -> None:
        model, scenario, clocks = simulated.model, simulated.scenario, simulated.clocks
        method = settings.create_method()
        name = asynchronous_communication(settings, method)
        assert name is not None
        self._method, self._model, self._optimizer = method, model, simulated.optimizer
        self._batches, self._recorder = simulated.batches, simulated.recorder
        ranks = model.ranks
        self._compute = scenario.compute_seconds(ranks).tolist()
        self._departures = {**scenario.departures, **scenario.crashes}
        self._bound = checked_staleness(settings.max_staleness, method)
        self._counters = [round_counter(settings, method) for _ in range(ranks)]
        scaled = checked_scale_steps(settings.scale_steps, method)
        self._scales = self._step_scales() if scaled else [1.0] * ranks
        self.queue = EventQueue()
        self.network = SimulatedNetwork(
            self.queue, scenario, ranks, scenario.byte_scale(model.nbytes)
        )
        self.network.bytes_sent += clocks.bytes_sent
        self.copies = ParameterCopies(model, method)
        self._buckets = [
            [self._bucket(rank, k, flat[rank]) for k, flat in enumerate(self.copies.averaged_flats)]
            for rank in range(ranks)
        ]
        self._exchange = EXCHANGES[name](
            method.schedule_along(checked_topology(settings, method, ranks)),
            self.network,
            [[bucket.flat for bucket in own] for own in self._buckets],
            method,
            self._on_arrival,
        )
        self._exchange.tells_all = self._bound is not None
        self.steps, self._rounds = simulated.steps_made(begun), [0] * ranks
        self._published = [False] * ranks
        self._waiting: set[int] = set()
        self._limit = sum(min(steps, self._departures.get(rank, steps)) for rank in range(ranks))
        self._losses: list[float] = []
        self._ranks = [self._steps_of(rank) for rank in range(ranks)]
        for rank in range(ranks):
            self.queue.schedule(float(clocks.now[rank]), partial(self._go_on, rank))

    @property
    def there(self) -> list[int]:
        """The ranks that are still in the run."""
        return [rank for rank, _ in enumerate(self.steps) if rank not in self._exchange.departed]

    def advance(self, step: int) -> None:
        """Run until the ranks have made ``step`` steps on average, or cannot make more."""
        total = min(step * self._model.ranks, self._limit)
        while sum(self.steps) < total and self.queue.run_next():
            pass

    def record(self, step: int) -> None:
        """Record the current measurements of the ranks that are still in the run."""
        there = self.there
        if self._losses:
            self._recorder.add_losses(make_tensor(self._losses, torch.float64))
            self._losses = []
        sent = float(self.network.bytes_sent[there].mean())
        self._recorder.record(step, self.queue.now, sent, there, self.steps)

    def _bucket(self, rank: int, number: int, flat: torch.Tensor) -> AveragedBucket:
        layout = self._model.layouts[number]
        bucket = AveragedBucket(number, flat, layout, self._optimizer.each[rank])
        bucket.parameters = self._optimizer.rows_of(rank, layout.names)
        bucket.rank, bucket.nodes = rank, self._model.ranks
        neighbors = NeighborTensors(bucket, lambda tensor: {})
        bucket.state.update(self._method.initial_state(bucket, neighbors))
        return bucket

    def _step_scales(self) -> list[float]:
        """Return the update scales that give fast and slow ranks equal influence."""
        seconds = self._compute
        return [step_scale([own / other for other in seconds]) for own in seconds]

    # the steps of a rank

    def _steps_of(self, rank: int) -> Iterator[float | None]:
        """Make a rank's steps; yield compute seconds, or None to wait for a message."""
        when = self._method.when
        while self.steps[rank] < self._departures.get(rank, self._limit):
            due = self._counters[rank].due()
            through = when is CommunicationTiming.THROUGH_STEP and not self._published[rank]
            if through or (due and when is CommunicationTiming.BEFORE_FORWARD):
                self.copies.take(rank)
                self._publish(rank)
            yield self._compute[rank]
            self._compute_gradients(rank)
            if when is CommunicationTiming.BEFORE_FORWARD:
                yield from self._mix_if(due, rank)
                self._update(rank)
            else:
                self._scale_by_bias(rank, torch.Tensor.mul_)
                self._update(rank)
                if due and not self._published[rank]:
                    self._publish(rank)
                yield from self._mix_if(due, rank)
            self._counters[rank].end(averaged=due)
            self._end(rank)
        self._exchange.departed = {**self._exchange.departed, rank: self._rounds[rank]}
        for waiting in list(self._waiting):
            self._on_arrival(waiting)

    def _go_on(self, rank: int) -> None:
        """Run a rank until it computes or waits for its neighbours."""
        for seconds in self._ranks[rank]:
            if seconds is None:
                self._waiting.add(rank)
            else:
                self.queue.schedule(self.queue.now + seconds, partial(self._go_on, rank))
            return

    def _on_arrival(self, rank: int) -> None:
        if rank in self._waiting:
            self._waiting.discard(rank)
            self._go_on(rank)

    def _publish(self, rank: int) -> None:
        self._published[rank] = True
        for bucket in self._buckets[rank]:
            bucket.round = self._rounds[rank]
        with torch.no_grad():
            sent = [self._method.outgoing(bucket) for bucket in self._taking_part(rank)]
            self._exchange.publish(rank, self._rounds[rank], sent)

    def _taking_part(self, rank: int) -> list[AveragedBucket]:
        return [bucket for bucket in self._buckets[rank] if self._method.takes_part(bucket)]

    def _compute_gradients(self, rank: int) -> None:
        """Compute the gradient at the parameters from the start of the step."""
        batch = self._batches.of([rank], [self.steps[rank]])
        gradients, loss = self._model.gradients_of(rank, batch)
        self._losses.append(loss)
        self._optimizer.set_gradients(rank, gradients)

    def _scale_by_bias(self, rank: int, scale: Scale) -> None:
        """Multiply or divide a rank's parameters by its push-sum weight, if there is one."""
        if self._exchange.bias is not None:
            self._model.scale(scale, self._exchange.bias(rank), rank)

    def _update(self, rank: int) -> None:
        scale, flats = self._scales[rank], [flat[rank] for flat in self._model.flats]
        with torch.no_grad():
            for bucket in self._buckets[rank] if self._method.replaces_gradients else ():
                self._method.before_update(bucket)
            before = [detached_copy(flat) for flat in flats] if scale != 1.0 else []
        self._optimizer.each[rank].step()
        with torch.no_grad():
            for flat, old in zip(flats, before, strict=bool(before)):
                flat.sub_(old).mul_(scale).add_(old)

    def _mix_if(self, due: bool, rank: int) -> Iterator[None]:
        """If due, average with the received tensors, once no neighbour lags too far."""
        if not due:
            return
        bound, number = self._bound, self._rounds[rank]
        while bound is not None and number >= bound and self._exchange.late(rank, number, bound):
            yield
        with torch.no_grad(), self.copies.averaged(rank):
            mixed = self._exchange.mix(rank, number)
            for bucket, one in zip(self._taking_part(rank), mixed, strict=True):
                self._method.incoming(bucket, ReceivedAverage(one))
        self._rounds[rank] += 1
        self._published[rank] = False

    def _end(self, rank: int) -> None:
        self._scale_by_bias(rank, torch.Tensor.div_)
        with torch.no_grad():
            for bucket in self._buckets[rank]:
                self._method.after_step(bucket)
        for scheduler in self._optimizer.schedulers[rank : rank + 1]:
            scheduler.step()
        self.steps[rank] += 1


def runs_asynchronously(settings: MethodSettings, scenario: Scenario, ranks: int) -> bool:
    """Return whether scenario and method make ranks run asynchronously.

    Raises:
        ArgumentError: They would, and that cannot be simulated with such settings.
    """
    if not scenario.asynchronous or ranks == 1:
        return False
    method = settings.create_method()
    communication = asynchronous_communication(settings, method)
    if communication is not None:
        check_asynchronous(settings, method, communication, scenario)
    return communication is not None
