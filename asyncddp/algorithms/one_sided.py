"""Averaging through windows: ranks publish and read at their own pace, and nobody waits."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from asyncddp.algorithms.bucket_windows import BucketWindows, Pane
from asyncddp.algorithms.communication import Communication, HandSet
from asyncddp.algorithms.contract import How
from asyncddp.algorithms.mixer import Mixer
from asyncddp.algorithms.rounds import Round
from asyncddp.algorithms.window_round import WindowRound
from asyncddp.context import Context
from asyncddp.errors import ArgumentError, PeerLeftError
from asyncddp.ops.mixing import Mixing
from asyncddp.ops.weights import Weights, number
from asyncddp.ops.windows import win_get_nonblocking
from asyncddp.windows.handle import WindowHandle
from topology import GraphOrSchedule, Neighbors, Schedule

__all__ = ["Accumulate", "Get", "OneSided", "Put"]


class OneSided(Communication):
    """A kind in which nobody waits, but where ``force_barrier`` or ``max_staleness`` say so."""

    def places(self, context: Context) -> int | None:
        """The number of ranks."""
        return context.size

    def inherited(self, context: Context) -> GraphOrSchedule | None:
        """The topology between ranks."""
        return context.topologies.load()

    def lay_out(self, mixer: Mixer) -> None:
        """Make windows; collective."""
        mixer.windows.open(mixer.own() or mixer.context.topologies.ranks)

    def begin(self, mixer: Mixer, schedule: Schedule | None) -> Round | None:
        """Open a round of windows; collective where they have to be made anew."""
        schedule = schedule or mixer.context.topologies.ranks
        mixer.windows.open(schedule)
        near = schedule.neighbors(mixer.context.rank, mixer.round)
        row = self.row(mixer.hand, near, mixer.windows)
        if not mixer.force_barrier:
            departed = mixer.windows.look(mixer.round, got=self.how is How.GET)
            row = self.without(row, departed)
            if mixer.windows.rates is not None:
                mixer.windows.rates.count()
        return WindowRound(mixer, self, row)

    @abstractmethod
    def row(self, hand: HandSet, near: Neighbors, windows: BucketWindows) -> Mixing:
        """This rank's weights of a round, by hand or as the topology has them.

        Raises:
            ArgumentError: Weights set by hand that cannot be.
        """

    def without(self, row: Mixing, departed: Collection[int]) -> Mixing:
        """Let this rank's own tensor have the weights of neighbours that have left."""
        return row.without(departed)

    @abstractmethod
    def publish(self, pane: Pane, row: Mixing, step: int) -> WindowHandle | None:
        """Let neighbours have the tensor of a window; gives what to wait for till they do."""

    def unforced(self, pane: Pane, row: Mixing) -> Mixing:
        """The weights with which it is published where ranks do not meet in each round."""
        del pane
        return row

    def fetch(self, pane: Pane, sources: Iterable[int]) -> None:
        """Ask for what neighbours have published, where it does not come by itself."""

    @abstractmethod
    def mix(self, pane: Pane, row: Mixing) -> None:
        """Mix what has come into the tensor of a window.

        Raises:
            PeerLeftError: A neighbour has ended, and what it published last cannot be read.
        """

    def mix_readable(self, pane: Pane, row: Mixing) -> None:
        """Mix what has come of neighbours whose memory can still be read."""
        try:
            self.mix(pane, row)
        except PeerLeftError:
            self.mix(pane, row.without(pane.window.unreadable(row.src_weights)))

    def cost(self, row: Mixing) -> int:
        """How many times a bucket travels."""
        return len(row.dst_weights)

    # bounded staleness

    def behind(self, pane: Pane, sources: Iterable[int], step: int) -> list[int]:
        """Which neighbours that have not left have not come to a step of theirs."""
        incoming, left = pane.window.edges.incoming, pane.window.context.engine.has_left
        return [s for s in sources if incoming[s].clock() < step and not left(s)]


class Put(OneSided):
    r"""Neighbours put their tensors here: :math:`x_i \leftarrow w_{ii} x_i + \sum_j w_{ij} b_j`.

    What has not come yet has no weight: that goes to the own tensor.
    """

    name = "win_put"
    how = How.PUT

    def by_hand(self, hand: HandSet) -> Mapping[str, float | Weights | Iterable[int] | None]:
        """With which weights it is mixed, and by which factors it is put."""
        return {
            "self_weight": hand.self_weight,
            "src_weights": hand.src_weights,
            "dst_weights": hand.dst_weights,
        }

    def row(self, hand: HandSet, near: Neighbors, windows: BucketWindows) -> Mixing:
        """The topology's row, factors of 1."""
        own, sources = _received(hand, near, windows)
        targets = _sent(self.name, hand.dst_weights, near.dst_ranks, windows, default=1.0)
        return Mixing(own, sources, targets)

    def publish(self, pane: Pane, row: Mixing, step: int) -> WindowHandle | None:
        """Put it."""
        window = pane.window
        return window.put(window.tensor, 1.0, row.dst_weights, add=False, with_p=False, step=step)

    def mix(self, pane: Pane, row: Mixing) -> None:
        """Mix with the last put of each."""
        heard = row.without([source for source in row.src_weights if not pane.heard(source)])
        weights = heard.self_weight, heard.src_weights
        pane.window.update(*weights, reset=False, clone=False, with_p=False)


class Get(OneSided):
    r"""Tensors are got from neighbours: :math:`x_i \leftarrow w_{ii} x_i + \sum_j w_{ij} x_j`.

    One on this machine is read at once. Another answers when its engine hears of it, and until
    then its tensor of the last answer counts.
    """

    name = "win_get"
    how = How.GET

    def by_hand(self, hand: HandSet) -> Mapping[str, float | Weights | Iterable[int] | None]:
        """With which weights it is mixed."""
        return {"self_weight": hand.self_weight, "src_weights": hand.src_weights}

    def row(self, hand: HandSet, near: Neighbors, windows: BucketWindows) -> Mixing:
        """The topology's row."""
        own, sources = _received(hand, near, windows)
        return Mixing(own, sources, {})

    def publish(self, pane: Pane, row: Mixing, step: int) -> WindowHandle | None:
        """Lay it down for whoever gets it."""
        with pane.window.lock:
            pane.window.clock = step
            pane.window.publish()
        return None

    def fetch(self, pane: Pane, sources: Iterable[int]) -> None:
        """Get it of those of whom nothing is awaited already."""
        self._land(pane)
        for source in sources:
            if source not in pane.gets:
                with suppress(PeerLeftError):  # what was got of it before still counts
                    pane.gets[source] = win_get_nonblocking(pane.window.name, [source])
        self._land(pane)

    def _land(self, pane: Pane) -> None:
        """Take note of what has come."""
        for source in [source for source, handle in pane.gets.items() if handle.poll()]:
            del pane.gets[source]
            pane.got.add(source)

    def mix(self, pane: Pane, row: Mixing) -> None:
        """Mix with what was got last of each."""
        self._land(pane)
        got = row.without([source for source in row.src_weights if source not in pane.got])
        window, weights = pane.window, (got.self_weight, got.src_weights)
        # a clone, since neighbours shall not get what is mixed half-way
        window.tensor.copy_(window.update(*weights, reset=False, clone=True, with_p=False))

    def cost(self, row: Mixing) -> int:
        """What is got counts where it is got."""
        return len(row.src_weights)

    def behind(self, pane: Pane, sources: Iterable[int], step: int) -> list[int]:
        """Get of neighbours what is of that step, where it is there, and say where it is not."""
        self._land(pane)
        window, left = pane.window, pane.window.context.engine.has_left
        late = [source for source in sources if window.read_step(source) < step]
        near = window.edges.gets
        self.fetch(pane, [s for s in late if s not in near or near[s].clock() >= step])
        return [s for s in late if window.read_step(s) < step and not left(s)]


class Accumulate(OneSided):
    r"""Shares are given and collected: :math:`x_i \leftarrow a_{ii} x_i + \sum_j b_j`, p alike.

    What a rank keeps and gives sums to one: :math:`a_{ji} = 1 / (d_i + 1)` for itself and its
    :math:`d_i` out-neighbours of the round, whatever weights the graph has. Where ranks do not
    meet, one that has not taken the last share yet gets no other, so that a slow neighbour does not
    draw everything to itself.
    """

    name = "win_accumulate"
    how = How.ACCUMULATE

    def by_hand(self, hand: HandSet) -> Mapping[str, float | Weights | Iterable[int] | None]:
        """Which shares are kept and given away."""
        return {"self_weight": hand.self_weight, "dst_weights": hand.dst_weights}

    def row(self, hand: HandSet, near: Neighbors, windows: BucketWindows) -> Mixing:
        """Equal shares."""
        targets = near.dst_ranks if hand.dst_weights is None else hand.dst_weights
        count = len(list(targets))
        share = 1.0 / (count + 1)
        if hand.self_weight is not None and count:
            share = (1.0 - hand.self_weight) / count
        shares = _sent(self.name, hand.dst_weights, near.dst_ranks, windows, default=share)
        given = math.fsum(shares.values())
        own = 1.0 - given if hand.self_weight is None else hand.self_weight
        if not own > 0.0 or min(shares.values(), default=0.0) < 0.0 or abs(own + given - 1) > 1e-9:
            raise ArgumentError(
                f"{self.name}: arguments self_weight, dst_weights: expected a share above 0 to "
                f"keep, and shares of others, which sum to 1 with it, got {own:.6g} and {shares}"
            )
        return Mixing(own, dict.fromkeys(windows.sources, 1.0), shares)

    def without(self, row: Mixing, departed: Collection[int]) -> Mixing:
        """Keep the shares of neighbours that have left; what they gave before is collected."""
        return _keeping(row, departed)

    def publish(self, pane: Pane, row: Mixing, step: int) -> WindowHandle | None:
        """Give the shares away."""
        window, own = pane.window, row.self_weight
        return window.put(window.tensor, own, row.dst_weights, add=True, with_p=True, step=step)

    def unforced(self, pane: Pane, row: Mixing) -> Mixing:
        """Keep the shares of those who have not taken the last one yet."""
        edges, shares = pane.window.edges.outgoing, row.dst_weights
        return _keeping(row, [peer for peer in shares if edges[peer].untaken()])

    def mix(self, pane: Pane, row: Mixing) -> None:
        """Collect, each share once."""
        pane.window.update(1.0, row.src_weights, reset=True, clone=False, with_p=True)


def _received(
    hand: HandSet, near: Neighbors, windows: BucketWindows
) -> tuple[float, Mapping[int, float]]:
    """The weights with which a rank mixes: its own, and those of its sources."""
    if hand.src_weights is None:
        if hand.self_weight is not None:
            raise ArgumentError(
                "arguments self_weight, src_weights: expected none, the second, or both; got "
                "self_weight alone"
            )
        return near.self_weight, near.src_weights
    sources = {int(s): number("win_update", "src_weights", w) for s, w in hand.src_weights.items()}
    windows.insist("src_weights", sources, outgoing=False)
    if hand.self_weight is None:
        return 1.0 - math.fsum(sources.values()), sources
    return number("win_update", "self_weight", hand.self_weight), sources


def _sent(
    verb: str,
    given: Weights | Iterable[int] | None,
    targets: Iterable[int],
    windows: BucketWindows,
    *,
    default: float,
) -> dict[int, float]:
    """The factors with which a rank publishes."""
    if given is None:
        return dict.fromkeys(targets, default)
    factors = given if isinstance(given, Mapping) else dict.fromkeys(given, default)
    windows.insist("dst_weights", factors, outgoing=True)
    return {int(rank): number(verb, "dst_weights", factor) for rank, factor in factors.items()}


def _keeping(row: Mixing, ranks: Collection[int]) -> Mixing:
    """Shares where some ranks get none: the own tensor keeps theirs."""
    kept = [share for peer, share in row.dst_weights.items() if peer in ranks]
    if not kept:
        return row
    given = {peer: share for peer, share in row.dst_weights.items() if peer not in ranks}
    return Mixing(math.fsum([row.self_weight, *kept]), row.src_weights, given)
