"""Window of one rank: publishes its tensor, and averages it with what neighbours have written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from asyncddp.errors import PeerLeftError
from asyncddp.kernels.weighted_sum import WeightedTensor
from asyncddp.windows.departure_detector import CONCLUDED
from asyncddp.windows.edge import Snapshot
from asyncddp.windows.publishing_window import PublishingWindow
from asyncddp.windows.receive_buffers import Staleness


class Window(PublishingWindow):
    """One rank's part of a window: its own tensor, and a receive buffer for each in-neighbour.

    It is made, opened and closed as :class:`PublishingWindow` says; this half reads.
    """

    def get(self, source: int, weight: float) -> None:
        """Read the tensor that a neighbour lets others get into its buffer."""
        with self.lock:
            self.require_open()
            edge = self.edges.get_readers[source]
            edge.announce_gets()
            try:
                snapshot = edge.look()
                if snapshot is not None:
                    self.store_get_result(source, snapshot, weight)
            finally:
                edge.release()

    def store_get_result(self, source: int, snapshot: Snapshot, weight: float) -> None:
        """Replace the value of a neighbour's buffer by a tensor that was got; p stays."""
        with self.lock:
            self.require_open()
            self._buffers.store_get_result(source, snapshot, weight)

    def update(
        self,
        self_weight: float,
        weights: Mapping[int, float],
        *,
        reset: bool,
        clone: bool,
        with_p: bool,
    ) -> torch.Tensor:
        r"""Form :math:`w_0 x + \sum_j w_j b_j` over buffers.

        Args:
            self_weight: :math:`w_0`.
            weights: :math:`w_j` of neighbours.
            reset: Set these buffers to zero; each value counts exactly once.
            clone: Return a new tensor; replace the rank's own otherwise.
            with_p: Map p too.

        Returns:
            The rank's own tensor, or the new one.
        """
        self._staging.throttle()
        with self.lock:
            self.require_open()
            terms: list[WeightedTensor] = []
            p = self.p * self_weight
            try:
                for source, content in self._buffers.contents(weights, take=reset).items():
                    factor = weights[source]
                    terms += [(tensor, weight * factor) for tensor, weight in content.terms]
                    p += content.p * factor
                result = self._staging.average_into(
                    self.tensor, self_weight, terms, len(weights) + 1, clone=clone
                )
            finally:
                self._buffers.release(weights)
            self.step_of_update += 1
            self._buffers.updated(weights)
            if with_p:
                self.p = p
            if not clone and (not self.step_of_put or self.is_read_by_gets):
                self.publish()
            return result

    def read_buffer(self, source: int) -> torch.Tensor:
        """Return a copy of a neighbour's buffer."""
        with self.lock:
            self.require_open()
            try:
                terms = self._buffers.content(source, take=False).terms
                return self._staging.new_sum(self.tensor, terms)
            finally:
                self._buffers.release([source])

    def unreadable(self, sources: Iterable[int]) -> list[int]:
        """Return the neighbours that have exited and whose last tensor cannot be read any more."""
        gone = []
        for source in sources:
            try:
                self.read_buffer(source)
            except PeerLeftError:
                gone.append(source)
        return gone

    def versions(self) -> dict[int, int]:
        """Return how many times each neighbour's buffer was written since the last update."""
        with self.lock:
            return self._buffers.versions()

    def staleness(self) -> dict[int, Staleness]:
        """Return the age of what was last read from each neighbour."""
        with self.lock:
            found = self._buffers.staleness(self.steps)
        for source, one in found.items():  # neighbours that have concluded have no more steps
            lag = one.lag + CONCLUDED if one.lag <= -(CONCLUDED // 2) else one.lag
            found[source] = one._replace(steps=one.steps % CONCLUDED, lag=lag)
        return found

    def read_step(self, source: int) -> int:
        """Return the neighbour's step of the tensor that was last read from it; 0 before the first.

        Where no step follows, CONCLUDED is added.
        """
        with self.lock:
            return self.steps - self._buffers.staleness(self.steps)[source].lag

    def known_steps_of(self, source: int, *, got: bool) -> int:
        """Return the last known step count of a neighbour.

        Where no step follows, CONCLUDED is added.

        Args:
            source: The neighbour.
            got: True if its tensor is got; False if it comes by its puts.
        """
        if not got:
            return self.edges.incoming[source].clock()
        reader = self.edges.get_readers.get(source)
        return self.read_step(source) if reader is None else reader.clock()
