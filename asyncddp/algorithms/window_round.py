"""A round through windows: publish the buckets, and mix in what has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from asyncddp.algorithms.rounds import Round
from asyncddp.algorithms.stopwatch import exposed
from asyncddp.context.context import use
from asyncddp.ops.barrier import barrier
from asyncddp.ops.mixing import Mixing
from asyncddp.windows.handle import WindowHandle

if TYPE_CHECKING:
    from asyncddp.algorithms.mixer import Mixer
    from asyncddp.algorithms.one_sided import OneSided

__all__ = ["WindowRound"]


class WindowRound(Round):
    """A round in which this rank publishes its buckets, and mixes in what has come.

    Args:
        mixer: Whose round.
        kind: How.
        row: With which weights.
    """

    def __init__(self, mixer: Mixer, kind: OneSided, row: Mixing) -> None:
        self._mixer, self._kind, self._row = mixer, kind, row
        self._step = mixer.round + 1
        if mixer.windows.first is None:
            mixer.windows.first = mixer.round
        self._flats: dict[int, torch.Tensor] = {}
        self._published: list[WindowHandle] = []

    @exposed
    def start(self, index: int, flat: torch.Tensor) -> None:
        """Publish a copy of a bucket, and ask for the neighbours' where that is needed."""
        mixer, kind = self._mixer, self._kind
        pane = mixer.windows[index]
        with use(mixer.context), torch.no_grad():
            pane.fill(flat)
            row = self._row if mixer.force_barrier else kind.unforced(pane, self._row)
            handle = kind.publish(pane, row, self._step)
            if handle is not None:
                self._published.append(handle)
                if mixer.max_staleness is not None:
                    pane.tell(self._step, but=row.dst_weights)
            if not mixer.force_barrier:
                kind.fetch(pane, self._row.src_weights)
        mixer.bytes_sent += kind.cost(row) * flat.nbytes
        self._flats[index] = flat

    def started(self, index: int) -> bool:
        """Whether that bucket was published."""
        return index in self._flats

    def settle(self) -> None:
        """Nothing of a bucket is read: what was published is a copy."""

    @exposed
    def install(self, arrived: Callable[[int], None] | None = None) -> None:
        """Mix in what has come by now.

        Args:
            arrived: Called with the index of each bucket before anything is mixed.

        Raises:
            PeerError: A neighbour that has to be waited for does not come, or is gone.
        """
        for index in self._flats:
            if arrived is not None:
                arrived(index)
        mixer = self._mixer
        with use(mixer.context), torch.no_grad():
            self._keep_up()
            if mixer.force_barrier:
                self._meet()
            for index, flat in self._flats.items():
                self._kind.mix_readable(mixer.windows[index], self._row)
                mixer.windows[index].spill(flat)
            if mixer.force_barrier:
                barrier()
        mixer.round += 1

    def _meet(self) -> None:
        """Wait until all ranks have published, and have what neighbours have."""
        panes = [self._mixer.windows[index] for index in self._flats]
        for handle in self._published:
            handle.wait()
        for pane in panes:
            pane.wait()  # for gets of earlier rounds, whose answers are too old
        barrier()
        for pane in panes:
            self._kind.fetch(pane, self._row.src_weights)
        for pane in panes:
            pane.wait()

    def _keep_up(self) -> None:
        """Wait for neighbours that are more than ``max_staleness`` steps behind."""
        mixer, bound = self._mixer, self._mixer.max_staleness
        first = mixer.windows.first or 0
        if bound is None or self._step - bound <= first:
            return
        panes = [mixer.windows[index] for index in self._flats]
        latest, sources = self._step - bound, self._row.src_weights

        def behind() -> list[int]:
            """The neighbours that are too far behind."""
            late = (self._kind.behind(pane, sources, latest) for pane in panes)
            return sorted({source for some in late for source in some})

        what = f"step {self._step} of {mixer.label} with max_staleness={bound}"
        mixer.context.engine.attend(lambda: not behind(), what, behind)
