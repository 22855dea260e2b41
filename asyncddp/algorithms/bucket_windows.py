"""The windows of one wrapper: one for each flat bucket, made and freed by all ranks together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from asyncddp.algorithms.contract import Algorithm
from asyncddp.algorithms.step_rates import StepRates
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError
from asyncddp.memory.allocate import empty_like
from asyncddp.ops.windows import create_along, get_current_created_window_names, win_free
from asyncddp.windows import Staleness, Window, windows_of
from asyncddp.windows.departures import Departures
from asyncddp.windows.handle import WindowHandle
from topology import Schedule

__all__ = ["BucketWindows", "Pane"]


class Pane:
    """The window of one flat bucket, and what this rank remembers of it.

    Args:
        window: The window; its tensor is the bucket, or has its shape.
        algorithm: The method, whose hooks say what of a bucket is published.

    Attributes:
        gets: What was asked of neighbours and has not come yet.
        got: Neighbours of whom something has come since the last restart.
    """

    def __init__(self, window: Window, algorithm: Algorithm) -> None:
        self.window, self._algorithm = window, algorithm
        self.gets: dict[int, WindowHandle] = {}
        self.got: set[int] = set()
        self._since = dict.fromkeys(window.edges.incoming, 0)

    def fill(self, flat: torch.Tensor) -> None:
        """Let the window's tensor be what is published of the bucket."""
        if not self._algorithm.plain:
            self.window.tensor.copy_(as_real(self._algorithm.outgoing(flat)))

    def spill(self, flat: torch.Tensor) -> None:
        """Let the bucket be what the mixed tensor of the window makes of it."""
        if not self._algorithm.plain:
            mixed = self.window.tensor
            mixed = torch.view_as_complex(mixed) if flat.is_complex() else mixed
            self._algorithm.incoming(flat, mixed)

    def heard(self, source: int) -> bool:
        """Whether a neighbour has put anything here since the last restart."""
        return self.window.edges.incoming[source].version() > self._since[source]

    def tell(self, step: int, but: Collection[int]) -> WindowHandle:
        """Tell neighbours that wait for this rank how far it is, but those who have heard it."""
        return self.window.tell(step, but)

    def conclude(self) -> None:
        """Tell all neighbours that no step follows, and let them get what is here."""
        self.window.conclude().wait()

    def wait(self) -> None:
        """Wait for what was asked of neighbours.

        Raises:
            PeerError: One does not answer, or is gone.
        """
        for handle in self.gets.values():
            handle.wait()

    def restart(self) -> None:
        """Forget what has come so far and what was asked for, and let others get what is here."""
        window, incoming = self.window, self.window.edges.incoming
        ones = dict.fromkeys(incoming, 1.0)
        window.update(1.0, ones, reset=True, clone=True, with_p=False)
        window.p = 1.0
        self._since = {source: edge.version() for source, edge in incoming.items()}
        for handle in self.gets.values():
            handle.cancel()
        self.gets.clear()
        self.got.clear()
        window.publish()


class BucketWindows:
    """The windows of one wrapper.

    Their buffers begin at zero; a neighbour of whom nothing has come yet has no weight. Windows are
    made before the first round, and again where the buckets have changed or somebody has freed
    them. They are never freed behind the back of the other ranks: by :meth:`free`, or at the end of
    the world.

    Args:
        context: The world.
        label: Begins their names.
        algorithm: The method. Where it has hooks, windows have tensors of their own.

    Attributes:
        first: Rounds completed before the first with these windows; None before that.
        scales_steps: Whether updates are scaled where ranks differ in speed.
        rates: How often ranks step, where that is so and the windows are there.
    """

    first: int | None = None
    scales_steps = False
    rates: StepRates | None = None

    def __init__(self, context: Context, label: str, algorithm: Algorithm) -> None:
        self._context, self._label, self._algorithm = context, label, algorithm
        self._flats: Sequence[torch.Tensor] = ()
        self._panes: list[Pane] = []
        self._departures = Departures(context.engine.has_left)

    def __getitem__(self, index: int) -> Pane:
        return self._panes[index]

    @property
    def sources(self) -> list[int]:
        """In-neighbours in any round."""
        return sorted({source for pane in self._panes for source in pane.window.edges.incoming})

    @property
    def departed(self) -> tuple[int, ...]:
        """In-neighbours that had left in the last round, ascending."""
        return self._departures.now

    def look(self, step: int, *, got: bool) -> tuple[int, ...]:
        """Look which in-neighbours have left; called once in each round.

        Args:
            step: Steps that this rank has made.
            got: Whether their tensors are got, or come by their puts.
        """
        window = self._panes[0].window if self._panes else None
        sources = () if window is None else window.edges.incoming
        steps = {} if window is None else {s: window.steps_of(s, got=got) for s in sources}
        return self._departures.look(step, steps)

    def lay_out(self, flats: Sequence[torch.Tensor]) -> None:
        """Say which flat buckets there are; collective where there were windows of others."""
        self.free()
        self._flats = flats

    def open(self, schedule: Schedule) -> None:
        """Make the windows that are not there; collective if any is missing.

        Args:
            schedule: Along its edges.

        Raises:
            ArgumentError: The schedule does not repeat, or another wrapper has the same prefix.
            MismatchError: Ranks differ.
        """
        if len(self._panes) == len(self._flats) and not self._missing():
            return
        self.free()
        panes: list[Pane] = []
        with use(self._context):
            for index, flat in enumerate(self._flats):
                name = f"{self._label}.bucket{index}"
                tensor = as_real(flat)
                tensor = tensor if self._algorithm.plain else empty_like(tensor)
                if not create_along(schedule, tensor, name, zero_init=True):
                    raise ArgumentError(
                        f"argument window_prefix: there is a window {name!r} already; give each "
                        "optimizer a prefix of its own, or free that window"
                    )
                window = windows_of(self._context).find("DistributedOptimizer", name)
                panes.append(Pane(window, self._algorithm))
            if self.scales_steps:
                self.rates = StepRates(self._context, self._label, schedule)
        self._panes, self.first = panes, None

    def _missing(self) -> bool:
        """Whether somebody has freed one of them, which all ranks do together."""
        with use(self._context):
            return not set(get_current_created_window_names()).issuperset(self._names())

    def _names(self) -> list[str]:
        names = [pane.window.name for pane in self._panes]
        return names if self.rates is None else [*names, self.rates.name]

    def free(self) -> None:
        """Free them; collective if there are any.

        Raises:
            WaitTimeoutError: A rank has not come by the deadline.
        """
        if not self._panes:
            return
        with use(self._context):
            there = get_current_created_window_names()
            for name in self._names():
                if name in there:
                    win_free(name)
        self._panes, self.rates = [], None

    def insist(self, argument: str, ranks: Iterable[int], *, outgoing: bool) -> None:
        """Refuse ranks to whom, or from whom, no edge of the windows leads.

        Raises:
            ArgumentError: There is one.
        """
        for pane in self._panes:
            edges = pane.window.edges
            known = sorted(edges.outgoing if outgoing else edges.incoming)
            strangers = sorted(set(ranks) - set(known))
            if strangers:
                what = "an out-neighbour" if outgoing else "an in-neighbour"
                raise ArgumentError(
                    f"{self._label}: argument {argument}: rank {strangers[0]} is not {what} in the "
                    f"topology along which the windows were made; those are {known}"
                )

    def restart(self) -> None:
        """Forget what has come so far; the parameters are about to be replaced."""
        self.first = None
        for pane in self._panes:
            if pane.window.end is None:
                pane.restart()

    def conclude(self) -> None:
        """No step will follow for now: nobody needs to wait for this rank."""
        with use(self._context):
            for pane in self._panes:
                if pane.window.end is None:
                    pane.conclude()

    def biases(self) -> list[float]:
        """The associated p of each bucket; 1 where nothing was ever given away."""
        if not self._panes:
            return [1.0] * len(self._flats)
        return [pane.window.p for pane in self._panes]

    def staleness(self) -> dict[int, Staleness]:
        """How old what was last read of each in-neighbour is, in the bucket where that is worst."""
        worst: dict[int, Staleness] = {}
        for pane in self._panes:
            for source, found in pane.window.staleness().items():
                known = worst.get(source)
                if known is None or (found.lag, found.seconds) > (known.lag, known.seconds):
                    worst[source] = found
        return worst


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as real numbers: weights are real, so that averages are the same."""
    return torch.view_as_real(flat) if flat.is_complex() else flat
