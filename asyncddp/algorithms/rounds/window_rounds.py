"""Averaging rounds through one-sided windows: by puts, by gets, and push-sum by accumulates."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from typing_extensions import override

from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.algorithms.rounds.averaging_round import AveragerState
from asyncddp.algorithms.rounds.bucket_windows import BucketWindow
from asyncddp.algorithms.rounds.window_round import WindowRound
from asyncddp.errors import ArgumentError, PeerLeftError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.weighted_average import require_finite
from asyncddp.ops.windows.get_and_update import win_get_nonblocking
from asyncddp.ops.windows.locking import weights_by_rank
from asyncddp.topology import Neighbors
from asyncddp.windows.nonblocking_handle import WindowHandle


class WindowPutRound(WindowRound):
    r"""One-sided averaging by puts: neighbours write their tensors into this rank's window.

    .. math:: x_i \leftarrow w_{ii} x_i + \sum_j w_{ij} b_j

    with :math:`b_j` the last tensor that neighbour j has put. Before its first arrival, its weight
    is added to the own weight.
    """

    name = "win_put"
    how = CommunicationPattern.PUT
    override_names = ("self_weight", "src_weights", "dst_weights")

    def _weight_row(self, near: Neighbors) -> WeightRow:
        """Return the topology's weights or the overrides, with factors of 1 for puts."""
        targets = _send_weights(self.name, self._averager, near, 1.0)
        return WeightRow(*_receive_weights(self._averager, near), targets)

    def _publish(self, bucket: BucketWindow, row: WeightRow) -> WindowHandle | None:
        """Put the tensor into the neighbours' windows."""
        window = bucket.window
        return window.put(
            window.tensor, 1.0, row.dst_weights, add=False, with_p=False, step=self._step
        )

    def _mix(self, bucket: BucketWindow, row: WeightRow) -> None:
        """Average with the latest put of each neighbour."""
        if self._averager.algorithm.counts_puts:
            heard = row.times(bucket.window.versions())
        else:
            heard = row.without([s for s in row.src_weights if not bucket.has_put_from(s)])
        weights = heard.self_weight, heard.src_weights
        bucket.window.update(*weights, reset=False, clone=False, with_p=False)


class WindowGetRound(WindowRound):
    r"""One-sided averaging by gets: this rank reads the neighbours' tensors from their windows.

    .. math:: x_i \leftarrow w_{ii} x_i + \sum_j w_{ij} x_j

    A neighbour on another machine replies later; until then its previous reply is used.
    """

    name = "win_get"
    how = CommunicationPattern.GET
    override_names = ("self_weight", "src_weights")

    def _weight_row(self, near: Neighbors) -> WeightRow:
        """Return the topology's weights or the overrides, without targets."""
        return WeightRow(*_receive_weights(self._averager, near), {})

    def _publish(self, bucket: BucketWindow, row: WeightRow) -> WindowHandle | None:
        """Publish the tensor locally, for neighbours to get."""
        with bucket.window.lock:
            bucket.window.clock = self._step
            bucket.window.publish()
        return None

    def _fetch(self, bucket: BucketWindow, sources: Iterable[int]) -> None:
        """Start gets from neighbours without a pending get."""
        self._collect_gets(bucket)
        pending, name = bucket.pending_gets, bucket.window.name
        for source in sources:
            if source not in pending:
                with suppress(PeerLeftError):  # what was got of it before still counts
                    pending[source] = win_get_nonblocking(name, [source])
        self._collect_gets(bucket)

    def _collect_gets(self, bucket: BucketWindow) -> None:
        pending = bucket.pending_gets
        for source in [source for source, handle in pending.items() if handle.poll()]:
            del pending[source]
            bucket.received_from.add(source)

    def _mix(self, bucket: BucketWindow, row: WeightRow) -> None:
        """Average with the latest tensor got from each neighbour."""
        self._collect_gets(bucket)
        got = row.without([s for s in row.src_weights if s not in bucket.received_from])
        window, weights = bucket.window, (got.self_weight, got.src_weights)
        # a clone, so that neighbours never get a half-averaged tensor
        window.tensor.copy_(window.update(*weights, reset=False, clone=True, with_p=False))

    def _transfer_count(self, row: WeightRow) -> int:
        """Return the number of gets, which are counted on the getting rank."""
        return len(row.src_weights)

    def _late_neighbors(self, bucket: BucketWindow, sources: Iterable[int], step: int) -> list[int]:
        """Get tensors of neighbours that have reached the step; return the late neighbours."""
        self._collect_gets(bucket)
        window, left = bucket.window, bucket.window.context.engine.has_exited
        late = [source for source in sources if window.read_step(source) < step]
        near = window.edges.get_readers
        self._fetch(bucket, [s for s in late if s not in near or near[s].clock() >= step])
        return [s for s in late if window.read_step(s) < step and not left(s)]


class PushSumWindowRound(WindowRound):
    r"""One-sided push-sum: ranks add shares of their tensors into their neighbours' windows.

    .. math:: x_i \leftarrow a_{ii} x_i + \sum_j b_j

    with :math:`b_j` the shares of neighbour j that this rank has not collected yet; the push-sum
    weight p is shared likewise. The shares that a rank keeps and gives sum to one. Without
    barriers, a neighbour that has not collected the last share yet gets no further one, so that a
    slow neighbour does not accumulate everything.
    """

    name = "win_accumulate"
    how = CommunicationPattern.ACCUMULATE
    override_names = ("self_weight", "dst_weights")

    def _weight_row(self, near: Neighbors) -> WeightRow:
        """Return equal shares for this rank and its out-neighbours, or the overrides."""
        overrides = self._averager.overrides
        targets = near.dst_ranks if overrides.dst_weights is None else overrides.dst_weights
        count = len(list(targets))
        share = 1.0 / (count + 1)
        if overrides.self_weight is not None and count:
            share = (1.0 - overrides.self_weight) / count
        shares = _send_weights(self.name, self._averager, near, share)
        given = math.fsum(shares.values())
        own = 1.0 - given if overrides.self_weight is None else overrides.self_weight
        if not own > 0.0 or min(shares.values(), default=0.0) < 0.0 or abs(own + given - 1) > 1e-9:
            raise ArgumentError(
                f"{self.name}: arguments self_weight, dst_weights: expected a share above 0 to "
                f"keep, and shares of others, which sum to 1 with it, got {own:.6g} and {shares}"
            )
        return WeightRow(own, dict.fromkeys(self._averager.windows.sources, 1.0), shares)

    def _without(self, row: WeightRow, departed: Collection[int]) -> WeightRow:
        """Keep the shares of departed neighbours; their earlier shares are still collected."""
        kept = [share for peer, share in row.dst_weights.items() if peer in departed]
        if not kept:
            return row
        given = {peer: share for peer, share in row.dst_weights.items() if peer not in departed}
        return WeightRow(math.fsum([row.self_weight, *kept]), row.src_weights, given)

    @override
    def leave_out_departed(self) -> None:
        """Give shares only to ranks from which, over others, shares come back.

        Else this rank's weight p would tend to zero, and its steps, divided by p, to infinity.
        """
        super().leave_out_departed()
        self._row = self._without(self._row, self._averager.windows.apart())

    def _publish(self, bucket: BucketWindow, row: WeightRow) -> WindowHandle | None:
        """Add the shares to the neighbours' windows."""
        window, own = bucket.window, row.self_weight
        return window.put(
            window.tensor, own, row.dst_weights, add=True, with_p=True, step=self._step
        )

    def _asynchronous_row(self, bucket: BucketWindow) -> WeightRow:
        """Keep the shares of neighbours that have not collected the last one yet."""
        edges, row, shares = bucket.window.edges.outgoing, self._row, self._row.dst_weights
        return self._without(row, [peer for peer in shares if edges[peer].has_unread()])

    def _mix(self, bucket: BucketWindow, row: WeightRow) -> None:
        """Add the received shares, each once."""
        bucket.window.update(1.0, row.src_weights, reset=True, clone=False, with_p=True)


def _receive_weights(averager: AveragerState, near: Neighbors) -> tuple[float, Mapping[int, float]]:
    """Return the averaging weights: own weight, and weights by source rank."""
    overrides, known = averager.overrides, averager.windows.sources
    if overrides.src_weights is None:
        if overrides.self_weight is not None:
            raise ArgumentError(
                "arguments self_weight, src_weights: expected none, the second, or both; got "
                "self_weight alone"
            )
        return near.self_weight, near.src_weights
    sources = weights_by_rank(
        "win_update", "src_weights", overrides.src_weights, known, "an in-neighbour"
    )
    if overrides.self_weight is None:
        return 1.0 - math.fsum(sources.values()), sources
    return require_finite("win_update", "self_weight", overrides.self_weight), sources


def _send_weights(
    verb: str, averager: AveragerState, near: Neighbors, default: float
) -> dict[int, float]:
    """Return the factors for published tensors, by target rank."""
    given, known = averager.overrides.dst_weights, averager.windows.targets
    if given is None:
        return dict.fromkeys(near.dst_ranks, default)
    factors = given if isinstance(given, Mapping) else dict.fromkeys(given, default)
    return weights_by_rank(verb, "dst_weights", factors, known, "an out-neighbour")
