"""A cluster of agreements whose messages, deaths and clocks a test drives, and what must hold."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable

from asyncddp.membership import Agreement, View
from asyncddp.membership.messages import Suspicion

PATIENCE = 1.0


class Uses:
    """How often a rank has used each name."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __call__(self) -> dict[str, int]:
        return self.counts


class Recorded(Agreement):
    """An agreement that remembers through which views it went since somebody looked."""

    def __init__(self, *arguments, **options) -> None:
        self.entered: list[View] = []
        super().__init__(*arguments, **options)

    def _enter(self, view: View) -> None:
        self.entered.append(view)
        super()._enter(view)


class Process:
    """One process of a rank: its agreement, its rounds, and the views that it went through."""

    def __init__(self, rank: int, members, *, number: int = 0) -> None:
        self.uses, self.number = Uses(), number
        self.agreement = Recorded(rank, members, self.uses, patience=PATIENCE, number=number)
        self.views: list[View] = [self.agreement.view] if rank in members else []
        self.frozen_counts: dict[str, int] | None = None
        self.leaves = False


class Cluster:
    """Ranks and the channels between them, each in order; it checks the invariants all the time."""

    def __init__(self, n: int) -> None:
        self.now = 0.0
        self.processes = {rank: Process(rank, range(n)) for rank in range(n)}
        self.channels: dict[tuple[int, int], list[bytes]] = defaultdict(list)
        self.cuts: set[tuple[int, int]] = set()
        self.ended: set[int] = set()  # ranks whose newest process is dead
        self.decided: dict[int, list[View]] = defaultdict(list)
        self.promised: dict[tuple[int, int], dict[str, int]] = {}  # by number and rank
        self.reporters: dict[int, set[int]] = defaultdict(set)

    @property
    def living(self) -> list[int]:
        return [rank for rank in self.processes if rank not in self.ended]

    @property
    def active(self) -> list[int]:
        """Ranks that live and are not isolated."""
        return [rank for rank in self.living if self.processes[rank].agreement.isolated is None]

    def act(self, rank: int, action: Callable[[Agreement], None], sent: int | None = None) -> None:
        """Let a living rank do something; with ``sent``, it dies after that many messages."""
        process = self.processes[rank]
        agreement = process.agreement
        before = agreement.view
        action(agreement)
        outgoing = agreement.outgoing()
        for _, message in outgoing:
            if isinstance(message, Suspicion) and not (message.certified or message.withdrawn):
                self.reporters[message.rank].add(rank)
        for peer, message in outgoing[:sent]:
            if (rank, peer) not in self.cuts and peer in self.processes:
                self.channels[rank, peer].append(pickle.dumps(message))
        if sent is not None:
            self.ended.add(rank)
        entered, agreement.entered = agreement.entered, []
        for view in entered:
            self._check_entry(rank, process, before, view)
            before = view
        if agreement.frozen and process.frozen_counts is None:
            process.frozen_counts = dict(process.uses.counts)
            self.promised[agreement.view.number + 1, rank] = process.frozen_counts
        if not agreement.frozen:
            process.frozen_counts = None
        self.check()

    def deliver(self, sender: int, receiver: int, sent: int | None = None) -> None:
        message = pickle.loads(self.channels[sender, receiver].pop(0))
        if receiver not in self.ended:
            self.act(receiver, lambda one: one.receive(sender, message, self.now), sent)

    def tick(self, rank: int, sent: int | None = None) -> None:
        self.act(rank, lambda one: one.tick(self.now), sent)

    def kill(self, rank: int) -> None:
        self.ended.add(rank)

    def certify(self, observer: int, dead: int) -> None:
        self.act(observer, lambda one: one.suspect(dead, certified=True, reason="", now=self.now))

    def suspect(self, observer: int, rank: int, sent: int | None = None) -> None:
        self.act(
            observer,
            lambda one: one.suspect(rank, certified=False, reason="silent", now=self.now),
            sent,
        )

    def withdraw(self, observer: int, rank: int) -> None:
        self.act(observer, lambda one: one.withdraw(rank))

    def use(self, rank: int, name: str) -> None:
        """Begin a round, unless the rank is frozen."""
        agreement, counts = self.processes[rank].agreement, self.processes[rank].uses.counts
        if not agreement.frozen and agreement.isolated is None and agreement.joined:
            counts[name] = counts.get(name, 0) + 1

    def leave(self, rank: int, sent: int | None) -> None:
        """Let a member ask for a view after which it takes no part."""
        process = self.processes[rank]
        if process.agreement.joined and not process.leaves:
            process.leaves = True
            self.act(rank, lambda one: one.leave(self.now), sent)

    def join(self, sponsor: int, rank: int) -> None:
        """Start a process of a rank that is new or dead, and ask for its admission."""
        assert rank not in self.processes or rank in self.ended
        view = self.processes[sponsor].agreement.view
        for pair in [pair for pair in self.channels if rank in pair]:
            self.channels[pair].clear()
        self.cuts = {pair for pair in self.cuts if rank not in pair}
        self.processes[rank] = Process(rank, set(view.members) - {rank}, number=view.number)
        self.ended.discard(rank)
        self.reporters.pop(rank, None)
        self.act(sponsor, lambda one: one.admit(rank, self.now))

    def _check_entry(self, rank: int, process: Process, before: View, view: View) -> None:
        """Check a view that a rank has entered."""
        counts = process.uses.counts
        stays = rank not in view.joined
        if stays:
            assert view.number == before.number + 1
            assert all(count <= view.starts.get(name, 0) for name, count in counts.items())
            assert process.frozen_counts is None or process.frozen_counts == counts
            self.promised.setdefault((view.number, rank), dict(counts))
        else:
            counts.update(view.starts)
        process.views.append(view)
        process.frozen_counts = None
        if view not in self.decided[view.number]:
            self.decided[view.number].append(view)
            if stays:
                self._check_decision(view, before)

    def _check_decision(self, view: View, before: View) -> None:
        """Check what holds where a view is decided: its starts, and who is left out."""
        stayed = set(view.members) - set(view.joined)
        assert stayed, view
        promised = [self.promised[view.number, rank] for rank in stayed]
        names = {name for counts in promised for name in counts}
        assert dict(view.starts) == {
            name: max(counts.get(name, 0) for counts in promised) for name in names
        }
        there = {
            rank
            for rank in self.active
            if any(one.number <= before.number for one in self.processes[rank].views)
        }  # else the process is a new one of a rank whose former process was dead
        for rank in set(view.left) & there:
            others = set(before.members) & there - {rank}
            reporters = self.reporters[rank] & set(before.members)
            assert 2 * len(reporters) > len(others), f"{rank} was removed by {reporters}"

    def check(self) -> None:
        """Living ranks hold one chain of views; those that joined a moment ago may yet yield."""
        held: dict[int, View] = {}
        for rank in self.active:
            for view in self.processes[rank].views:
                if rank in view.voters and rank not in view.fresh:
                    assert held.setdefault(view.number, view) == view, (
                        rank,
                        view,
                        held[view.number],
                    )

    def settle(self, rounds: int = 40) -> None:
        """Let all messages flow and all evidence be complete; then all must be as one."""
        self.cuts.clear()
        for _ in range(rounds):
            self.ended |= {rank for rank in self.living if rank not in self.active}  # they exit
            for observer in self.active:
                for peer in self.processes[observer].agreement.view.members:
                    self._complete_evidence(observer, peer)
            self.flow()
            for _ in range(2):
                self.now += PATIENCE / 2
                for rank in self.active:
                    self.tick(rank)
                self.flow()
        self.check_settled()

    def _complete_evidence(self, observer: int, peer: int) -> None:
        """Let a rank see that a peer has ended, or that a peer has left it out and is silent."""
        if observer not in self.active or observer == peer:
            return
        process = self.processes[peer]
        seen = [one.number for one in self.processes[observer].views if peer in one.joined]
        former = not process.agreement.joined and max(seen, default=-1) <= process.number
        if peer in self.ended or former:  # the former process of the rank has ended
            self.certify(observer, peer)
        elif observer not in self.processes[peer].agreement.view.members:
            self.suspect(observer, peer)

    def flow(self) -> None:
        """Deliver all messages, and those that answer them."""
        for _ in range(100_000):
            pairs = [pair for pair, messages in self.channels.items() if messages]
            if not pairs:
                return
            for pair in pairs:
                self.deliver(*pair)
        raise AssertionError("the ranks never stop to send messages")

    def check_settled(self) -> None:
        members = [rank for rank in self.active if self.processes[rank].agreement.joined]
        views = [self.processes[rank].agreement.view for rank in members]
        for view in views:
            assert view == views[0]
            assert list(view.members) == sorted(members), (view, members)
        for rank in members:
            process = self.processes[rank]
            assert not process.agreement.frozen
            told = [one.number for one in process.views if rank in one.leaving]
            assert len(told) == process.leaves, (rank, told)
