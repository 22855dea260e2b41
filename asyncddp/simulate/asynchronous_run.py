"""A method at work on ranks that go on at their own pace, event by event."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from asyncddp.algorithms.averaged_bucket import AveragedBucket, ReceivedAverage
from asyncddp.algorithms.method_traits import CommunicationTiming
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.optim.distributed_optimizer_arguments import checked_scale_steps, checked_staleness
from asyncddp.optim.method_settings import MethodSettings
from asyncddp.simulate.asynchronous_exchange import EXCHANGES
from asyncddp.simulate.events import EventQueue, SimulatedNetwork
from asyncddp.simulate.method_checks import (
    asynchronous_communication,
    check_asynchronous,
    checked_topology,
)
from asyncddp.simulate.record import SimulatedRanks
from asyncddp.simulate.scenario import Scenario
from asyncddp.tensors.allocation import detached_copy, make_tensor

_LARGEST = 4.0  # the largest factor by which an update is scaled, as on real ranks


class AsynchronousRun:
    r"""A method on all ranks, each of which makes its steps at its own time.

    A step of rank i begins at :math:`t`, with what it publishes, and ends at :math:`t + c_i`, with
    what has arrived by then; the next one begins at once, unless ``max_staleness`` has it wait.

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
        self._departures = scenario.departures
        self._bound = checked_staleness(settings.max_staleness, method)
        self._interval = settings.steps_per_round(method)
        scaled = checked_scale_steps(settings.scale_steps, method)
        self._scales = self._step_scales() if scaled else [1.0] * ranks
        self.queue = EventQueue()
        self.network = SimulatedNetwork(
            self.queue, scenario, ranks, scenario.byte_scale(model.nbytes)
        )
        self.network.bytes_sent += clocks.bytes_sent
        through = method.when is CommunicationTiming.THROUGH_STEP
        self._copies = [detached_copy(flat) for flat in model.flats] if through else []
        flats = self._copies or model.flats
        self._buckets = [
            [self._bucket(rank, k, flat[rank]) for k, flat in enumerate(flats)]
            for rank in range(ranks)
        ]
        self._exchange = EXCHANGES[name](
            method.schedule_along(checked_topology(settings, method, ranks)),
            self.network,
            [[bucket.flat for bucket in own] for own in self._buckets],
            self._on_arrival,
        )
        self._exchange.tells_all = self._bound is not None
        self.steps, self._rounds = simulated.steps_made(begun), [0] * ranks
        self._warm_up = list(self.steps)
        self._published = [False] * ranks
        self._waiting: dict[int, Callable[[], None]] = {}
        self._limit = sum(min(steps, scenario.departures.get(rank, steps)) for rank in range(ranks))
        self._losses: list[float] = []
        for rank in range(ranks):
            self.queue.schedule(float(clocks.now[rank]), partial(self._begin_step, rank))

    @property
    def there(self) -> list[int]:
        """The ranks that have not left."""
        return [rank for rank, _ in enumerate(self.steps) if rank not in self._exchange.departed]

    def advance(self, step: int) -> None:
        """Go on until the ranks have made so many steps on average, or all that they can."""
        total = min(step * self._model.ranks, self._limit)
        while sum(self.steps) < total and self.queue.run_next():
            pass

    def record(self, step: int) -> None:
        """Record what is now, of the ranks that are there."""
        there = self.there
        if self._losses:
            self._recorder.add_losses(make_tensor(self._losses, torch.float64))
            self._losses = []
        sent = float(self.network.bytes_sent[there].mean())
        self._recorder.record(step, self.queue.now, sent, there, self.steps)

    def _bucket(self, rank: int, number: int, flat: torch.Tensor) -> AveragedBucket:
        layout = self._model.layouts[number]
        bucket = AveragedBucket(number, flat, layout, self._optimizer.of_rank(rank))
        bucket.parameters = self._optimizer.rows_of(rank, layout.names)
        bucket.rank, bucket.nodes = rank, self._model.ranks
        neighbors = NeighborTensors(bucket, lambda tensor: {})
        bucket.state.update(self._method.initial_state(bucket, neighbors))
        return bucket

    def _step_scales(self) -> list[float]:
        """Return by what updates are scaled, so that ranks of different speed count alike."""
        seconds = self._compute
        rates = [[own / other for other in seconds] for own in seconds]
        return [min(sum(row) / len(row), _LARGEST * min(row)) for row in rates]

    # one step

    def _begin_step(self, rank: int) -> None:
        if self.steps[rank] >= self._departures.get(rank, self._limit):
            self._exchange.departed = {**self._exchange.departed, rank: self._rounds[rank]}
            for waiting in list(self._waiting):
                self._on_arrival(waiting)
            return
        when, due = self._method.when, self._is_due(rank)
        if when is CommunicationTiming.BEFORE_FORWARD and due:
            self._publish(rank)
        elif when is CommunicationTiming.THROUGH_STEP and not self._published[rank]:
            for copy, flat in zip(self._copies, self._model.flats, strict=True):
                copy[rank].copy_(flat[rank])
            self._publish(rank)
        end = self.queue.now + self._compute[rank]
        self.queue.schedule(end, partial(self._compute_and_update, rank))

    def _is_due(self, rank: int) -> bool:
        made = self.steps[rank] - self._warm_up[rank]
        return made % self._interval == self._interval - 1

    def _publish(self, rank: int) -> None:
        self._published[rank] = True
        for bucket in self._buckets[rank]:
            bucket.round = self._rounds[rank]
        with torch.no_grad():
            sent = [self._method.outgoing(bucket) for bucket in self._buckets[rank]]
            self._exchange.publish(rank, self._rounds[rank], sent)

    def _compute_and_update(self, rank: int) -> None:
        """Compute the gradient at the parameters with which the step began, then go on."""
        batch = self._batches.of([rank], [self.steps[rank]])
        gradients, loss = self._model.gradients_of(rank, batch)
        self._losses.append(loss)
        self._optimizer.set_gradients(rank, gradients)
        when, due = self._method.when, self._is_due(rank)
        if when is CommunicationTiming.BEFORE_FORWARD:
            self._mix_if(due, rank, lambda: self._update_and_end(rank))
            return
        self._scale_by_bias(rank, torch.Tensor.mul_)
        self._update(rank)
        if due and when is CommunicationTiming.AFTER_BIASED_STEP:
            self._publish(rank)
        self._mix_if(due, rank, lambda: self._end(rank))

    def _scale_by_bias(self, rank: int, scale: Callable[[torch.Tensor, float], object]) -> None:
        """Multiply or divide a rank's parameters by its push-sum weight, where there is one."""
        bias = self._exchange.bias
        if bias is not None:
            with torch.no_grad():
                for flat in self._model.flats:
                    scale(flat[rank], bias(rank))

    def _update(self, rank: int) -> None:
        scale, flats = self._scales[rank], [flat[rank] for flat in self._model.flats]
        with torch.no_grad():
            for bucket in self._buckets[rank] if self._method.replaces_gradients else ():
                self._method.before_update(bucket)
            before = [detached_copy(flat) for flat in flats] if scale != 1.0 else []
        self._optimizer.step_rank(rank)
        with torch.no_grad():
            for flat, old in zip(flats, before, strict=bool(before)):
                flat.sub_(old).mul_(scale).add_(old)

    def _update_and_end(self, rank: int) -> None:
        self._update(rank)
        self._end(rank)

    def _mix_if(self, due: bool, rank: int, then: Callable[[], None]) -> None:
        """Average with what has arrived, if due, once no neighbour is too far behind."""
        bound, number = self._bound, self._rounds[rank]
        bounded = due and bound is not None and number >= bound
        if bounded and self._exchange.late(rank, number, bound or 0):
            self._waiting[rank] = partial(self._mix_if, due, rank, then)
            return
        if due:
            self._mix(rank)
        then()

    def _on_arrival(self, rank: int) -> None:
        waiting = self._waiting.pop(rank, None)
        if waiting is not None:
            waiting()

    def _mix(self, rank: int) -> None:
        with torch.no_grad():
            pairs = list(zip(self._copies, self._model.flats, strict=bool(self._copies)))
            for copy, flat in pairs:
                flat[rank].sub_(copy[rank])
            mixed = self._exchange.mix(rank, self._rounds[rank])
            for bucket, one in zip(self._buckets[rank], mixed, strict=True):
                self._method.incoming(bucket, ReceivedAverage(one))
            for copy, flat in pairs:
                flat[rank].add_(copy[rank])
        self._rounds[rank] += 1
        self._published[rank] = False

    def _end(self, rank: int) -> None:
        self._scale_by_bias(rank, torch.Tensor.div_)
        with torch.no_grad():
            for bucket in self._buckets[rank]:
                self._method.after_step(bucket)
        self._optimizer.end_step_rank(rank)
        self.steps[rank] += 1
        self._begin_step(rank)


def runs_asynchronously(settings: MethodSettings, scenario: Scenario, ranks: int) -> bool:
    """Return whether ranks go on at their own pace, by the scenario and the method.

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
