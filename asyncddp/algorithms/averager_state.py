"""State that the averaging rounds of one optimizer share: windows, weights and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from time import perf_counter
from typing import Any, TypeVar, cast

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.bucket_windows import BucketWindowSet
from asyncddp.algorithms.join_coordinator import JoinCoordinator
from asyncddp.context import Context
from asyncddp.ops.weight_resolver import Weights

F = TypeVar("F", bound=Callable[..., Any])


class CumulativeTimer:
    """Cumulative timer: a context manager that adds up the seconds spent inside; not re-entrant."""

    __slots__ = ("_started", "seconds")

    def __init__(self) -> None:
        self.seconds = self._started = 0.0

    def __enter__(self) -> None:
        self._started = perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += perf_counter() - self._started


def count_exposed_time(method: F) -> F:
    """Decorate a method: add its duration to the exposed time of its object's averager."""

    @wraps(method)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._averager.exposed_time:
            return method(self, *args, **kwargs)

    return cast("F", timed)


@dataclass
class WeightOverrides:
    """Averaging weights that the user sets in place of the topology's; None keeps those."""

    self_weight: float | None = None
    src_weights: Weights | None = None
    dst_weights: Weights | Iterable[int] | None = None
    src_machine_weights: Weights | None = None
    dst_machine_weights: Weights | Iterable[int] | None = None


class AveragerState:
    """State that the averaging rounds of one optimizer share: windows, weights and counters.

    Attributes:
        round: Rounds completed so far, which is the index of the schedule's next round.
        bytes_sent: Payload bytes sent to peers so far.
        exposed_time: Time that rounds took on the caller's thread, to send, wait and average.
        join_coordinator: Agrees on the active ranks before each round, inside ``join``.
        force_barrier: Whether ranks synchronise before and after they average from windows.
        max_staleness: How many steps a neighbour may lag before this rank waits for it.
        overlapping: Whether a round starts before the last one is complete, so that ranks may
            finish its buckets in different orders.
    """

    def __init__(self, context: Context, algorithm: Algorithm, label: str) -> None:
        self.context, self.algorithm, self.label = context, algorithm, label
        self.overrides = WeightOverrides()
        self.round = 0
        self.bytes_sent = 0
        self.exposed_time = CumulativeTimer()
        self.join_coordinator: JoinCoordinator | None = None
        self.windows = BucketWindowSet(context, label, algorithm)
        self.force_barrier = False
        self.max_staleness: int | None = None
        self.overlapping = False
