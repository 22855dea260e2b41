"""Scenarios: ranks of different speed, slow links, late and lost messages, and churn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from asyncddp.errors import ArgumentError
from asyncddp.topology import Link, Links

Numbers = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Lives = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Scenario:
    """Scenario of a simulation: the properties of its ranks and their network.

    Args:
        step_seconds: Time of a step's gradients and update, in seconds.
        slowdown: By which factor ranks take longer, ``{3: 10.0}``; others take ``step_seconds``.
        links: Latency and bandwidth between the ranks: a :class:`.topology.Links`, which says which
            ranks share a machine as well, one :class:`.topology.Link` for all, or its text such as
            ``"100Mbit,20ms"``.
        delay: Seconds by which messages of a rank arrive later than over its links, ``{0: 0.2}``.
        loss: Probability that a message is lost. The receiver's own tensor takes its
            place, as where a neighbour has left; with push-sum, the share is gone.
        retransmit_after: Seconds after which a lost message is sent again, until it arrives, in the
            order of those between two ranks, as TCP does it, after 0.2 s at least: a loss then
            costs time and bytes, and changes nothing else. None: what is lost is gone.
        asynchronous: Whether ranks go on at their own pace with methods that let them: a step ends
            at its rank's time, and mixes what has arrived by then. Otherwise all meet in each
            round.
        departures: The step after which a rank leaves, ``{5: 100}``, as real ranks do at the end of
            a :func:`asyncddp.join` block: its weight is its neighbours' own from then on, or what
            they would give it is, where columns of W sum to one. In an average over all ranks it
            counts no more, and answers; with ``relay_sgd`` it relays.
        crashes: The step after which a rank dies, ``{5: 100}``, as in an elastic run: in the round
            of the next step its weight goes to its neighbours' own, and the round after it is of a
            new view, in which trackers, corrections and push-sum weights begin anew. Who dies after
            0 steps is not there from the start.
        arrivals: The step after which a rank that has died comes back, ``{5: 120}``, as a new one:
            it takes the model and the states of optimizer and method from its sponsor, the next
            rank below it that trains. What neighbours know of each other begins anew.
        redraw: Whether the topology is drawn anew for the members of each view, if it was given by
            name, as a function, or not at all; else its edges stay, without the dead ranks' ones.
            Where ranks are asynchronous, edges stay, as those of real windows do.
        model_bytes: Size of the model for which bytes and times are given, in bytes, as if this
            small one had it; None for its own.
        seed: Seed of the message losses.

    Raises:
        ArgumentError: A negative time, a probability outside of [0, 1), a slowdown that is not
            above 0, or an arrival of a rank that lives.

    Example:
        >>> from asyncddp import simulate
        >>> late = simulate.Scenario(slowdown={3: 10.0}, links="100Mbit,20ms", loss=0.01)
        >>> simulate.Scenario(loss=1.5)  # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        asyncddp.errors.ArgumentError: Scenario: argument loss: expected a probability of at least 0
        and below 1, got 1.5
    """

    step_seconds: float = 0.01
    slowdown: Mapping[int, float] = field(default_factory=dict)
    links: Links | Link | str = field(default_factory=Links)
    delay: Mapping[int, float] = field(default_factory=dict)
    loss: float = 0.0
    retransmit_after: float | None = None
    asynchronous: bool = False
    departures: Mapping[int, int] = field(default_factory=dict)
    crashes: Mapping[int, int] = field(default_factory=dict)
    arrivals: Mapping[int, int] = field(default_factory=dict)
    redraw: bool = True
    model_bytes: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        links = Link.parse(self.links) if isinstance(self.links, str) else self.links
        object.__setattr__(self, "links", links if isinstance(links, Links) else Links(links))
        if not 0 <= self.loss < 1:
            raise ArgumentError(
                "Scenario: argument loss: expected a probability of at least 0 and below 1, got "
                f"{self.loss!r}"
            )
        _check("step_seconds", self.step_seconds, "seconds above 0", zero=False)
        if self.model_bytes is not None:
            _check("model_bytes", self.model_bytes, "bytes above 0, or None", zero=False)
        if self.retransmit_after is not None:
            _check(
                "retransmit_after", self.retransmit_after, "seconds above 0, or None", zero=False
            )
        for rank, factor in self.slowdown.items():
            _check(f"slowdown of rank {rank}", factor, "a factor above 0", zero=False)
        for rank, seconds in self.delay.items():
            _check(f"delay of rank {rank}", seconds, "seconds of at least 0", zero=True)
        for name in ("departures", "crashes", "arrivals"):
            for rank, step in getattr(self, name).items():
                _check(f"{name} of rank {rank}", step, "a number of steps of at least 0", zero=True)
        self._check_lives()

    def _check_lives(self) -> None:
        for rank, step in self.arrivals.items():
            if not self.crashes.get(rank, step) < step:
                died = f"dies after {self.crashes[rank]}" if rank in self.crashes else "lives"
                raise ArgumentError(
                    f"Scenario: argument arrivals: rank {rank} comes after {step} steps, but "
                    f"{died}; expected a rank that has died before, by crashes={{{rank}: "
                    f"{max(step - 1, 0)}}} at the latest"
                )
        both = sorted({*self.departures} & {*self.crashes})
        if both:
            raise ArgumentError(
                f"Scenario: arguments departures, crashes: rank {both[0]} is in both; expected one"
            )

    def check(self, ranks: int, steps: int) -> None:
        """Raise an ArgumentError for a rank or step that does not exist, or if nobody trains."""
        for name in ("slowdown", "delay", "departures", "crashes", "arrivals"):
            for rank in getattr(self, name):
                if not 0 <= rank < ranks:
                    raise ArgumentError(
                        f"Scenario: argument {name}: there is no rank {rank} among {ranks}; "
                        f"expected 0 to {ranks - 1}"
                    )
        for name in ("crashes", "arrivals"):
            for rank, step in getattr(self, name).items():
                if step >= steps:
                    raise ArgumentError(
                        f"Scenario: argument {name}: the run has {steps} steps, and rank {rank} "
                        f"would {'die' if name == 'crashes' else 'come'} after {step}; expected "
                        "fewer"
                    )
        changes = self.departures, self.crashes, self.arrivals
        for step in sorted({step for one in changes for step in one.values()}):
            if not (self.active(ranks, step) & self.active(ranks, max(step - 1, 0))).any():
                raise ArgumentError(
                    f"Scenario: arguments departures, crashes: all {ranks} ranks leave; expected "
                    f"one to stay, but after {step} steps none is left"
                )
        self.network.check_size(ranks)

    @property
    def network(self) -> Links:
        """The links between ranks."""
        assert isinstance(self.links, Links)
        return self.links

    @property
    def ranks_per_machine(self) -> int:
        """Number of ranks per machine."""
        return self.network.ranks_per_machine

    def byte_scale(self, nbytes: int) -> float:
        """Return the factor from a model's ``nbytes`` to the size of the model it stands for."""
        return 1.0 if self.model_bytes is None else self.model_bytes / nbytes

    def compute_seconds(self, ranks: int) -> Numbers:
        """Return the compute time per step of each rank, ``(n,)``."""
        return self.step_seconds * _by_rank(self.slowdown, ranks, 1.0)

    def delays(self, ranks: int) -> Numbers:
        """Return the delay of each rank's messages in seconds, ``(n,)``."""
        return _by_rank(self.delay, ranks, 0.0)

    def stays(self, ranks: int, step: int) -> Mask:
        """Return which ranks have not departed before step number ``step``; the first is 0."""
        return step < _by_rank(self.departures, ranks, math.inf)

    def alive(self, ranks: int, step: int) -> Mask:
        """Return which ranks live in a step."""
        died, comes = (_by_rank(one, ranks, math.inf) for one in (self.crashes, self.arrivals))
        return (step < died) | (step >= comes)

    def active(self, ranks: int, step: int) -> Mask:
        """Return which ranks take part in a step."""
        return self.stays(ranks, step) & self.alive(ranks, step)

    def view(self, ranks: int, step: int) -> Lives:
        """Return the view to which a round of a step belongs: the lives of each member, else 0.

        A rank that has died in this very step is a member.
        """
        came = step >= _by_rank(self.arrivals, ranks, math.inf)
        before = self.alive(ranks, max(step - 1, 0))
        return (before | came) * (1 + came.astype(np.int64))

    def arriving(self, ranks: int, step: int) -> dict[int, int]:
        """Return the ranks that come before a step, and the sponsor of each."""
        new = sorted(rank for rank, comes in self.arrivals.items() if comes == step)
        trains = np.flatnonzero(self.active(ranks, step) & self.active(ranks, max(step - 1, 0)))
        return {rank: int(trains[np.searchsorted(trains, rank) - 1]) for rank in new}

    def steps_made(self, ranks: int, step: int) -> list[int]:
        """Return each rank's number of steps after ``step`` steps of the remaining ranks."""
        ends = np.minimum(
            _by_rank(self.departures, ranks, step), _by_rank(self.crashes, ranks, step)
        )
        again = np.maximum(step - _by_rank(self.arrivals, ranks, step), 0)
        return [int(made) for made in np.minimum(ends, step) + again]

    @property
    def loses_ranks(self) -> str:
        """Name of the argument by which ranks leave the run; empty if none does."""
        return "departures" if self.departures else "crashes" if self.crashes else ""

    @property
    def loses_messages(self) -> bool:
        """True if lost messages are not sent again."""
        return self.loss > 0 and self.retransmit_after is None

    def lost_messages(self, number: int, sources: npt.NDArray[np.intp]) -> Mask:
        """Draw which messages of round ``number`` are permanently lost, one per source."""
        if not self.loses_messages:
            return np.zeros(len(sources), dtype=bool)
        return np.random.default_rng([self.seed, number]).random(len(sources)) < self.loss

    def seconds_again(self, number: int, rounds: int, messages: int) -> float:
        """Draw the delay of allreduce ``number`` by retransmissions, in seconds."""
        if not self.loss or self.retransmit_after is None:
            return 0.0
        random = np.random.default_rng([self.seed, number])
        failures = random.geometric(1 - self.loss, (rounds, messages)) - 1
        return self.retransmit_after * float(failures.max(axis=1, initial=0).sum())

    def failures(
        self, number: int, sources: npt.NDArray[np.intp], targets: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.int64] | None:
        """Draw how often each message between machines is lost; None if none is sent again."""
        if not self.loss or self.retransmit_after is None:
            return None
        random = np.random.default_rng([self.seed, number])
        drawn = random.geometric(1 - self.loss, len(sources)) - 1
        local = self.ranks_per_machine
        return np.where((local > 1) & (sources // local == targets // local), 0, drawn)


def _by_rank(given: Mapping[int, float], ranks: int, usual: float) -> Numbers:
    found = np.full(ranks, usual)
    for rank, value in given.items():
        found[rank] = value
    return found


def _check(what: str, value: float, expected: str, *, zero: bool) -> None:
    if not value >= 0 or (value == 0 and not zero) or math.isinf(value):
        raise ArgumentError(f"Scenario: argument {what}: expected {expected}, got {value!r}")
