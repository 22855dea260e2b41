"""Windows and pairwise averaging of one optimizer's flat buckets, created and freed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received, ReceivedAverage
from asyncddp.algorithms.step_rate_estimator import StepRateEstimator
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError
from asyncddp.ops.barrier import barrier
from asyncddp.ops.windows.creation import create_along, get_current_created_window_names, win_free
from asyncddp.tensors.allocation import detached_copy
from asyncddp.topology import Schedule
from asyncddp.topology.default_schedule import default_schedule
from asyncddp.topology.schedule import connected_parts
from asyncddp.windows import Staleness, Window, windows_of
from asyncddp.windows.departure_detector import DepartureDetector
from asyncddp.windows.nonblocking_handle import PendingGet, WindowHandle
from asyncddp.windows.pair_averaging import PairAveraging
from asyncddp.windows.pair_averaging_service import pair_averaging_of


class BucketWindow:
    """One-sided window of one flat bucket, with its pending gets and received puts.

    Attributes:
        pending_gets: Handles of gets that have not completed, by neighbour.
        received_from: Neighbours from which a get has completed since the last reset.
    """

    def __init__(self, window: Window, algorithm: Algorithm, bucket: AveragedBucket) -> None:
        self.window, self._algorithm, self._bucket = window, algorithm, bucket
        self.pending_gets: dict[int, WindowHandle] = {}
        self.received_from: set[int] = set()
        self._versions_at_reset = dict.fromkeys(window.edges.incoming, 0)

    def pack(self) -> None:
        """Write the bucket's outgoing tensor into the window."""
        if not self._algorithm.plain:
            self.window.tensor.copy_(as_real(self._algorithm.outgoing(self._bucket)))

    def mixed(self) -> Received | None:
        """Return the averaged tensor in the window; None if that is the bucket itself."""
        plain = self._algorithm.plain
        return None if plain else received_like(self._bucket.flat, self.window.tensor)

    def has_put_from(self, source: int) -> bool:
        """Return whether a neighbour has put a tensor here since the last reset."""
        return self.window.edges.incoming[source].version() > self._versions_at_reset[source]

    def wait(self) -> None:
        """Wait for the pending gets."""
        for handle in self.pending_gets.values():
            handle.wait()

    def reset(self) -> None:
        """Discard received tensors and pending gets, and publish the current tensor."""
        window, incoming = self.window, self.window.edges.incoming
        ones = dict.fromkeys(incoming, 1.0)
        window.update(1.0, ones, reset=True, clone=True, with_p=False)
        window.p = 1.0
        self._versions_at_reset = {source: edge.version() for source, edge in incoming.items()}
        for handle in self.pending_gets.values():
            handle.cancel()
        self.pending_gets.clear()
        self.received_from.clear()
        window.publish()


class BucketPairAverages:
    """Pairwise averages of one optimizer's flat buckets, created and freed on all ranks.

    All ranks must free it equally often, since the names contain the number of times.
    """

    def __init__(self, context: Context, label: str) -> None:
        self._context, self._label, self._generation = context, label, 0
        self._pairs: dict[str, PairAveraging] = {}

    def __getitem__(self, index: int) -> PairAveraging:
        return self._pairs[self._name(index)]

    def _name(self, index: int) -> str:
        return f"{self._label}.bucket{index}.{self._generation}"

    def __iter__(self) -> Iterator[PairAveraging]:
        return iter(self._pairs.values())

    def look(self, peer: int) -> list[PendingGet]:
        """Request copies of a peer's tensors in all buckets."""
        service = pair_averaging_of(self._context)
        return [service.look(name, peer) for name in self._pairs]

    def ensure_created(self, count: int) -> None:
        """Create pairwise averaging for ``count`` buckets unless it exists; collective if not."""
        if len(self._pairs) != count:
            self.free()
            self._create(count)
            with use(self._context):
                barrier()  # before it a rank may not know yet what it is asked for

    def _create(self, count: int) -> None:
        service = pair_averaging_of(self._context)
        names = [self._name(index) for index in range(count)]
        self._pairs = {name: service.add(name) for name in names}

    def free(self) -> None:
        """Free the averaging of all buckets; averages in flight are lost on both ranks."""
        if self._pairs:
            pair_averaging_of(self._context).remove(self._pairs)
        self._pairs, self._generation = {}, self._generation + 1

    def restart(self) -> None:
        """Recreate the averaging, since the parameters are about to be replaced."""
        count = len(self._pairs)
        self.free()
        if count:
            self._create(count)

    def conclude(self) -> None:
        """Refuse averaging with other ranks until the next round."""
        with self._context.engine.lock:
            for one in self._pairs.values():
                one.conclude()


class BucketWindowSet:
    """Set of one-sided windows for the flat buckets of one optimizer, one window per bucket.

    Windows are created before the first round, and again if the buckets have changed or the user
    has freed them. They are freed only collectively: by :meth:`free`, or at the end of the world.

    Attributes:
        departures: Detector of in-neighbours that have left; ``now`` are those of the last round.
        first_round: Index of the first round with these windows; None before it.
        scales_steps: Whether updates are scaled for ranks of different speed.
        step_rates: Estimator of the ranks' step rates; None unless updates are scaled.
    """

    first_round: int | None = None
    scales_steps = False
    step_rates: StepRateEstimator | None = None

    def __init__(self, context: Context, label: str, algorithm: Algorithm) -> None:
        self._context, self._label, self._algorithm = context, label, algorithm
        self._buckets: Sequence[AveragedBucket] = ()
        self._windows: list[BucketWindow] = []
        self.departures = DepartureDetector(context.engine.has_exited, context.engine.has_failed)
        self.pairs = BucketPairAverages(context, label)
        self._schedule: Schedule | None = None
        self._failed: frozenset[int] = frozenset()
        self._apart: frozenset[int] = frozenset()

    def __getitem__(self, index: int) -> BucketWindow:
        return self._windows[index]

    @property
    def sources(self) -> list[int]:
        """In-neighbours of any round, ascending."""
        return sorted({source for one in self._windows for source in one.window.edges.incoming})

    @property
    def targets(self) -> list[int]:
        """Out-neighbours of any round, ascending."""
        return sorted({target for one in self._windows for target in one.window.edges.outgoing})

    def count_step(self) -> None:
        """Count a step of this rank for the estimation of step rates."""
        if self.step_rates is not None:
            self.step_rates.count()

    def update_departures(self, *, got: bool) -> tuple[int, ...]:
        """Return the departed in-neighbours; call it once in each round."""
        if not self._windows:
            return self.departures.look(0, {})
        window = self._windows[0].window  # all buckets make the same steps
        steps = {s: window.known_steps_of(s, got=got) for s in window.edges.incoming}
        return self.departures.look(window.steps, steps)

    def apart(self) -> frozenset[int]:
        """Return the ranks to which and from which no edges lead, now that some have failed."""
        engine, ranks = self._context.engine, range(self._context.size)
        if self._schedule is None or not engine.lost_peers.any:
            return self._apart
        failed = frozenset(filter(engine.has_failed, ranks))
        if failed != self._failed:
            parts = connected_parts(self._schedule, failed)
            mine = next(part for part in parts if self._context.rank in part)
            self._failed, self._apart = failed, frozenset(ranks) - mine
        return self._apart

    def set_buckets(self, buckets: Sequence[AveragedBucket]) -> None:
        """Set the flat buckets, and free existing windows; collective if there are any."""
        self.free()
        self._buckets = buckets

    def ensure_created(self, schedule: Schedule) -> None:
        """Create the windows if any is missing; collective in that case."""
        with use(self._context):
            known = set(get_current_created_window_names())  # without those that the user has freed
            if len(self._windows) == len(self._buckets) and known.issuperset(self._names()):
                return
            self.free()
            bucket_windows: list[BucketWindow] = []
            for bucket in self._buckets:
                name = f"{self._label}.bucket{bucket.index}"
                tensor = as_real(bucket.flat)
                tensor = tensor if self._algorithm.plain else detached_copy(tensor)
                if not create_along(schedule, tensor, name, zero_init=True):
                    raise ArgumentError(
                        f"argument window_prefix: there is a window {name!r} already; give each "
                        "optimizer a prefix of its own, or free that window"
                    )
                window = windows_of(self._context).find("DistributedOptimizer", name)
                bucket_windows.append(BucketWindow(window, self._algorithm, bucket))
            if self.scales_steps:
                self.step_rates = StepRateEstimator(self._context, self._label, schedule)
        self._windows, self.first_round, self._schedule = bucket_windows, None, schedule

    def ensure_pairs_created(self) -> None:
        """Create pairwise averaging and step-rate estimator if missing; collective in that case."""
        self.pairs.ensure_created(len(self._buckets))
        if not self.scales_steps:
            return
        with use(self._context):
            known = get_current_created_window_names()
        if self.step_rates is None or self.step_rates.name not in known:
            forwarded = default_schedule(self._context.size)
            self.step_rates = StepRateEstimator(self._context, self._label, forwarded)

    def _names(self) -> list[str]:
        names = [one.window.name for one in self._windows]
        return names if self.step_rates is None else [*names, self.step_rates.name]

    def free(self) -> None:
        """Free all windows; collective if there are any."""
        self.pairs.free()
        if not self._windows and self.step_rates is None:
            return
        with use(self._context):
            there = get_current_created_window_names()
            for name in self._names():
                if name in there:
                    win_free(name)
        self._windows, self.step_rates = [], None

    def publish_to_all(self, step: int) -> int:
        """Put all tensors to all neighbours of any round, and wait for all ranks; collective."""
        sent = 0
        with use(self._context):
            handles = []
            for window in (one.window for one in self._windows):
                weights = dict.fromkeys(window.edges.outgoing, 1.0)
                handles.append(
                    window.put(window.tensor, 1.0, weights, add=False, with_p=False, step=step)
                )
                sent += len(weights) * window.tensor.nbytes
            for handle in handles:
                handle.wait()
            barrier()
        return sent

    def reset(self) -> None:
        """Discard received tensors, since the parameters are about to be replaced."""
        self.first_round = None
        self.pairs.restart()
        for one in self._windows:
            if one.window.end is None:
                one.reset()

    def conclude(self) -> None:
        """Announce that no step follows for now, and publish the tensors."""
        self.pairs.conclude()
        with use(self._context):
            for one in self._windows:
                if one.window.end is None:
                    one.window.conclude().wait()

    def resume(self) -> None:
        """Announce that steps follow again."""
        for one in self._windows:
            one.window.resume()

    @property
    def published_steps(self) -> int:
        """Published step count of this rank, plus CONCLUDED if no step follows for now."""
        clocks = [one.window.clock for one in self._windows] or [one.steps for one in self.pairs]
        return clocks[0] if clocks else 0

    def look(self, peer: int) -> list[PendingGet]:
        """Request the last published tensors of all buckets from any rank."""
        manager = windows_of(self._context)
        return [manager.look(one.window, peer) for one in self._windows] or self.pairs.look(peer)

    def push_sum_weights(self) -> list[float]:
        """Return the push-sum weight p of each bucket; 1 without windows."""
        return [one.window.p for one in self._windows] or [1.0] * len(self._buckets)

    def staleness(self) -> dict[int, Staleness]:
        """Return the staleness of each in-neighbour's last read tensor, for the stalest bucket."""
        worst: dict[int, Staleness] = {}
        for one in self._windows:
            for source, found in one.window.staleness().items():
                known = worst.get(source, found)
                worst[source] = max(known, found, key=lambda age: (age.lag, age.seconds))
        return worst


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as a view of real numbers; averages with real weights are equal."""
    return torch.view_as_real(flat) if flat.is_complex() else flat


def received_like(flat: torch.Tensor, mixed: torch.Tensor) -> Received:
    """Convert an average of :func:`as_real` tensors to a result for a bucket like ``flat``."""
    return ReceivedAverage(torch.view_as_complex(mixed) if flat.is_complex() else mixed)
