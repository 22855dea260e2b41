"""Progress of elastic runs: calls wait while members change; interrupted collectives restart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

from typing_extensions import override

from asyncddp.config import Config
from asyncddp.engine.membership_changes import ENDED, STEP, GatedLock, MembershipChanges
from asyncddp.engine.messages import COLLECTIVE, MatchKey, Message
from asyncddp.engine.operation_exchanges import OperationExchanges
from asyncddp.engine.progress_loop import ProgressLoop
from asyncddp.engine.replica_agreement import ReplicaAgreement
from asyncddp.engine.tracing import EngineTracing
from asyncddp.engine.work import Work
from asyncddp.errors import AsyncDDPError, IsolatedError, PeerLeftError
from asyncddp.membership import View
from asyncddp.transport.base import Transport

R = TypeVar("R")


class ElasticProgress(ProgressLoop):
    """Progress loop which, in elastic runs, also agrees with other ranks on the current members.

    Attributes:
        submit_lock: Held while operations are counted and queued; in elastic runs callers do not
            get it while ranks agree on a view.
        on_view: Called with each view that begins.
        step: The training step that this rank has begun; None where steps are not counted.
        refusal: Says why no rank can join, empty if ranks can; asked once a process would join.
        slot_paths: Fast paths of collectives, which the verbs fill and read.
        membership: The views of an elastic run; None in other runs.
        replica_agreements: Agreements on sharded replicas, which follow the views of these ranks.
        on_failure: Called with each rank that was killed or has raised, and the reason.
    """

    def __init__(
        self,
        transport: Transport,
        config: Config,
        tracing: EngineTracing,
        agreement: ReplicaAgreement | None = None,
    ) -> None:
        self.config = config
        self._count_lock = threading.Lock()  # so that submitting never waits for a round
        self.submit_lock: AbstractContextManager[object] = self._count_lock
        self.on_view: list[Callable[[View], object]] = []
        self.step: int | None = None
        self.refusal: Callable[[], str] = str
        self.slot_paths: dict[Any, Any] = {}
        self.membership: MembershipChanges | None = None
        self.replica_agreements: list[ReplicaAgreement] = []
        self.on_failure: list[Callable[[int, str], object]] = []
        self._collective, self._ended_before_view = COLLECTIVE, 0
        super().__init__(transport, config, tracing)
        if self.matcher.elastic and transport.size > 1:
            facts = transport.rank, transport.size, self._promised_counts, self.matcher.sends
            self.membership = MembershipChanges(*facts, transport.outside, agreement)
            if agreement is not None:
                agreement.count = self._counts_of_group
            self.submit_lock = GatedLock(self._count_lock, self._wait_for_view)

    @override
    def _receive_membership(self, peer: int, message: Message) -> None:
        if self.membership is not None:
            self.membership.receive(peer, message)

    def claim_use(self, name: str) -> MatchKey:
        """Count a use of a name by an operation in progress; return its match key."""
        with self._count_lock:
            step = self._use_counts[name]
            self._use_counts[name] = step + 1
        return MatchKey(name, step)

    def _is_current(self, view: View) -> bool:
        membership = self.membership
        return membership is not None and membership.view is view and not membership.frozen

    @override
    def _progress_membership(self) -> None:
        """Go on with the agreement on the next view, and begin it once it is decided."""
        membership = self.membership
        if membership is None:
            return
        if self.lost_peers.any:
            # where a rank is lost, no agreement needs an answer of one that has left in order
            gone = range(self.transport.size) if membership.loses else membership.gone
            for peer, reason in self.lost_peers.outside(gone):
                membership.suspect(peer, reason, certified=self.transport.has_ended(peer))
                for callback in self.on_failure if self.has_failed(peer) else ():
                    callback(peer, reason)
        self._admit_replacements(membership)
        view = membership.progress()
        if view is None:
            return
        for replicas in self.replica_agreements:
            replicas.learn(view)
        rank = self.transport.rank
        for peer in view.joined:
            if peer != rank:
                self.lost_peers.readmit(peer)
                self.transport.readmit(peer)
        if view.left and not membership.awaits_part:
            out = set(view.left).difference(view.joined)
            self.lost_peers.mark_dead(dict.fromkeys(out, f"view {view.number} leaves it out"))
            self.matcher.forget_rounds(view.left, view.starts)
            self._tell_of_view(membership.view)
            self._redo_interrupted()
        membership.enter()  # callers begin nothing before

    def _admit_replacements(self, membership: MembershipChanges) -> None:
        """Ask for a view with ranks that have asked to join."""
        for peer, ready in self.transport.pending_replacements():
            why = self.refusal()
            later = membership.awaits_part or membership.has_leavers or self.step is None
            if ready and not (why or later):
                membership.admit(peer)
            else:
                self.transport.answer_replacement(peer, membership.agreed, why)

    def _tell_of_view(self, view: View) -> None:
        for callback in self.on_view:
            callback(view)

    def begin_step(self, step: int) -> View | None:
        """Begin a training step; return the view that begins with it, if ranks join or leave."""
        membership = self.membership
        with self.lock, self.submit_lock:
            self.step = step
            if membership is None:
                return None
            view = membership.take_in(step, dict(self._use_counts))
            if view is not None and view.members:
                self._change_members(view, membership)
            return view

    def _change_members(self, view: View, membership: MembershipChanges) -> None:
        """Go on in a view that begins between two steps."""
        for peer in view.joined:
            self.matcher.readmit(peer)
        self._replace_slots(None)  # without memory of a new process, or unread data in them
        if membership.collective != self._collective:
            self._ended_before_view += self._use_counts[self._collective]
            self._collective = membership.collective
        self._tell_of_view(view)

    def leave(self) -> None:
        """Ask for a step from which this rank takes no part; :meth:`begin_step` tells."""
        assert self.membership is not None
        with self.lock:
            self.membership.leave()

    def view_to_join(self) -> View | None:
        """Return the view in which this rank is to take part, once there is one."""
        membership = self.membership
        return membership.view_to_join() if membership is not None else None

    def first_step(self) -> int:
        """Return the step from which this rank takes part."""
        assert self.membership is not None
        return self.membership.first_step()

    def collective_numbers(self) -> tuple[int, int]:
        """Return the view since which collectives are counted, and how many ended before it."""
        assert self.membership is not None
        return self.membership.last_loss, self._ended_before_view

    def adopt(self, step: int, counts: Mapping[str, int], numbers: tuple[int, int]) -> None:
        """Begin a step as the others do, of which this rank has missed the steps before."""
        membership = self.membership
        assert membership is not None
        with self.lock, self._count_lock:
            self.step = step
            membership.last_loss, self._ended_before_view = numbers
            self._use_counts.clear()
            self._use_counts.update(counts)
            view = membership.take_in(step, dict(counts))
            assert view is not None
            self._collective = membership.collective
            self._tell_of_view(view)

    def begin_round(self, name: str, number: int) -> View | None:
        """Begin a round of several exchanges; return the view to which it belongs, if any.

        In an elastic run it waits while ranks agree on a view.
        """
        if self.membership is None:
            return None
        with self.submit_lock:
            self._use_counts[name] = number + 1
        return self.membership.view_at(name, number)

    def views_after(self, number: int) -> list[View]:
        """Return the views that have begun after one, as far as they are remembered."""
        return [] if self.membership is None else self.membership.views_after(number)

    def forget_uses(self, name: str) -> None:
        """Forget how often a name has been used that nobody uses any more."""
        with self._count_lock:
            self._use_counts.pop(name, None)

    def _wait_for_view(self) -> bool:
        """Make progress if ranks agree on a view, and return whether they do."""
        membership = self.membership
        if membership is None or self.closed or not membership.frozen:
            return False
        self._count_lock.release()
        try:
            self.transport.backoff(0 if self.progress() else 1)
        finally:
            self._count_lock.acquire()
        return True

    def _promised_counts(self) -> Mapping[str, int]:
        self._advance()  # what all ranks have posted ends here as on the others
        with self._count_lock:
            interrupted = self._under_way_of_all()
            for work in interrupted if self.membership is None or self.membership.loses else ():
                work.interrupt()
            begun = self._ended_before_view + self._use_counts[self._collective]
            counts = {**self._use_counts, ENDED: begun - len(interrupted)}
        for replicas in self.replica_agreements:
            counts |= replicas.promised()
        return counts if self.step is None else {**counts, STEP: self.step + 1}

    def _counts_of_group(self) -> Mapping[str, int]:
        """Return the counts of a column of replicas, once it has begun all views so far."""
        membership = self.membership
        with self.lock, suppress(IsolatedError):  # raised where the group makes progress
            while membership is not None and not (self.closed or membership.settled):
                self._progress_membership()
            if not self.closed:
                return self._promised_counts()
        return {}

    def _under_way_of_all(self) -> list[Work[Any]]:
        """List the collectives of all ranks that are under way, in their order."""
        every = [work for work in (*self.active, *self.queue) if work.spec.again is not None]
        return sorted(every, key=lambda work: work.key.step)

    def _redo_interrupted(self) -> None:
        assert self.membership is not None
        under_way, ended = self._under_way_of_all(), self.membership.view.starts.get(ENDED, 0)
        with self._count_lock:
            begun = self._ended_before_view + self._use_counts[self._collective]
            lost = ended - (begun - len(under_way))
            ended_here = ended - self._ended_before_view
        for work in under_way[:lost]:
            if not work.resume():
                work.fail(PeerLeftError(_lost_result(work)))
        if lost > len(under_way):
            self.matcher.channels.fail_next_call(PeerLeftError(_lost_result(None)))
        for work in under_way[lost:]:
            work.discard()
        self._replace_slots(ended_here)
        self._ended_before_view, self._collective = ended, self.membership.collective
        for work in under_way[lost:]:
            self._redo(work)

    def _replace_slots(self, ended: int | None) -> None:
        """Give the collectives of a new view the slots of its members; drop them without a count.

        ``ended`` is the number of collectives that have ended in the view before.
        """
        assert self.membership is not None
        slots = self.matcher.slots.pop(self._collective, None)
        if slots is not None and ended is not None:
            members = self.membership.view.members
            self.matcher.slots[self.membership.collective] = slots.among(members, ended)
        self.slot_paths.clear()

    def _redo(self, work: Work[R]) -> None:
        """Begin an interrupted collective again, among the members of the new view."""
        assert work.spec.again is not None
        assert self.membership is not None
        try:
            spec = work.spec.again()
        except AsyncDDPError as error:
            work.fail(error)
            return
        key = self.claim_use(spec.match_name)
        check = spec.check or self.config.check
        number = work.operation.round_number
        work.restart(
            spec,
            OperationExchanges(
                self.matcher, spec.verb, key, number, check=check, members=spec.members
            ),
            self.membership.view.members,
        )


def _lost_result(work: Work[Any] | None) -> str:
    """Say that the other ranks have the result of a collective, and this rank cannot get it."""
    what = "a collective" if work is None else work.describe()
    return (
        f"{what} has ended on other ranks with what a rank gave that has left since, and cannot "
        "be repeated; start this rank anew"
    )
