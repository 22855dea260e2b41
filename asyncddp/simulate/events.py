"""Event queue in simulated time, and a network whose message arrivals are events."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from asyncddp.simulate.scenario import Scenario


class EventQueue:
    """Event queue in simulated time; events at equal times run in the order of scheduling.

    Attributes:
        now: Time of the current event, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def schedule(self, time: float, event: Callable[[], None]) -> None:
        """Schedule an event at a time; past times count as now."""
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), event))

    def run_next(self) -> bool:
        """Run the next event; return False if there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


class SimulatedNetwork:
    """Simulated network of all ranks: delays messages by a cost model of the links, or loses them.

    Args:
        queue: The events.
        scenario: Links, delays and losses.
        ranks: Number of ranks.
        scale: Factor on bytes, if the model stands for a larger one.

    Attributes:
        bytes_sent: Bytes sent by each rank, ``(n,)``.
    """

    def __init__(self, queue: EventQueue, scenario: Scenario, ranks: int, scale: float) -> None:
        self.queue, self._scenario, self._scale = queue, scenario, scale
        self._delays = scenario.delays(ranks)
        self._random = np.random.default_rng([scenario.seed, ranks])
        self.bytes_sent = np.zeros(ranks)
        self._last_arrivals: dict[tuple[int, int], float] = {}

    def send(
        self, source: int, targets: Sequence[int], nbytes: float, arrive: Callable[[int], None]
    ) -> list[int]:
        """Send a message to some ranks at once; return the ranks that will never receive it.

        ``arrive(target)`` is called when it is there. Where it is sent again until it arrives,
        messages between two ranks arrive in the order in which they were sent.
        """
        if not targets:
            return []
        ends = np.full(len(targets), source), np.array(targets)
        nbytes *= self._scale
        self.bytes_sent[source] += nbytes * len(targets)
        links = self._scenario.network
        seconds = links.latencies(*ends) + links.transfers(*ends, nbytes) + self._delays[source]
        lost, again = [], self._scenario.retransmit_after
        for target, after in zip(targets, seconds.tolist(), strict=True):
            failures = self._count_failures(forever=again is None)
            if failures and again is None:
                lost.append(target)
                continue
            self.bytes_sent[source] += failures * nbytes
            arrival = self.queue.now + after + failures * (again or 0.0)
            if again is not None:
                arrival = max(arrival, self._last_arrivals.get((source, target), 0.0))
                self._last_arrivals[source, target] = arrival
            self.queue.schedule(arrival, partial(arrive, target))
        return lost

    def _count_failures(self, *, forever: bool) -> int:
        """Draw how often a message is lost; at most once if it is lost ``forever``."""
        count, loss = 0, self._scenario.loss
        while loss and self._random.random() < loss:
            count += 1
            if forever:
                break
        return count
