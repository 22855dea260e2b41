"""``monitor``: what happens on all ranks, seen on rank 0 while they train."""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from asyncddp.algorithms.stopwatch import Stopwatch
from asyncddp.context.context import use
from asyncddp.errors import UsageError
from asyncddp.monitoring.arguments import MONITORS, check
from asyncddp.monitoring.courier import ROOT, Courier
from asyncddp.monitoring.gathering import Gathering, Report
from asyncddp.monitoring.pace import Pace
from asyncddp.monitoring.record import Record
from asyncddp.monitoring.sinks import Sink, opener
from asyncddp.monitoring.sketch import Projection
from asyncddp.monitoring.subjects import Subject, subject_of
from asyncddp.ops.agreement import agree
from asyncddp.optim.averages import squared_deviation
from asyncddp.rank_lists import list_ranks

__all__ = ["Monitor", "monitor"]

logger = logging.getLogger("asyncddp")

_PATIENCE = 2  # later reports for which a step waits
_PATIENT = 1.0  # seconds by which they must be later
_LAST_WORDS = 2.0  # seconds


def monitor(
    watched: Any,
    every: int = 50,
    to: Any = "console",
    consensus: str | None = "projection",
    *,
    first_step: int = 0,
) -> Monitor:
    r"""Report every so many steps how all ranks are doing.

    Of each rank: the consensus distance :math:`\lVert x_i - \bar x \rVert_2`, the gradient norm,
    the time of a step and how much of it averaging and monitoring took, the bytes sent, and with
    one-sided methods the staleness and the neighbours that have left; see
    :class:`asyncddp.monitoring.Record`. Every rank sends its figures to rank 0 by a one-sided
    message, so that nobody waits for anybody; rank 0 writes them while it makes its own steps.

    The distance is found from 64 numbers of each rank, a random projection of its parameters that
    is the same on all, with a relative standard error of :math:`1/\sqrt{2 \cdot 64} \approx 9\,\%`.
    With ranks that go in step, projections of the same step are compared; with one-sided methods
    each with the newest of the others.

    Making one is collective. It ends with its ``with`` block, with :meth:`Monitor.close`, or with
    the world.

    Args:
        watched: A :class:`DistributedOptimizer` with any method, or a
            :class:`DecentralizedDataParallel`.
        every: Steps from report to report.
        to: Where reports go, or a list of such, of which rank 0's counts: ``"console"`` for a table
            on a terminal and lines elsewhere; a path that ends in ``.jsonl`` for one JSON object
            per rank and report, for ``asyncddp report``; ``"tensorboard:DIR"`` or a
            ``SummaryWriter``; a function that is called with each record as a dict; None for
            ``Monitor.latest`` alone.
        consensus: ``"projection"``; ``"exact"`` for the distance itself, for which all ranks wait
            and all parameters travel; None for no distance.
        first_step: Steps that were made before, in a run that is resumed; files are continued then.

    Returns:
        The monitor, a context manager.

    Raises:
        ArgumentError: An argument that cannot be, or a file that cannot be written.
        UsageError: It is monitored already.
        EnvironmentProblem: TensorBoard is not installed.
        MismatchError: Ranks differ in ``every``, ``consensus`` or ``first_step``.

    Example:
        >>> import asyncddp as bf, torch
        >>> def train(seen):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, 3.0 * bf.rank())
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ...     optimizer = bf.DistributedOptimizer(optimizer, model, communication="empty")
        ...     with bf.monitor(optimizer, every=1, to=seen.append, consensus="exact"):
        ...         model(torch.ones(1, 1)).sum().backward()
        ...         optimizer.step()
        >>> seen = []
        >>> with bf.local_world(2) as world:
        ...     _ = world.run(train, seen)
        >>> [(r["rank"], r["step"], r["consensus_distance"]) for r in seen]
        [(0, 1, 1.5), (1, 1, 1.5)]

    References:
        Kong et al., "Consensus control for decentralized deep learning", ICML 2021, on the
        distance; Achlioptas, "Database-friendly random projections", JCSS 2003.
    """
    subject = subject_of(watched)
    check(subject, every, consensus, first_step)
    open_sinks = opener(to, again=first_step > 0)
    sinks = open_sinks() if subject.context.rank == ROOT else []
    with ExitStack() as undo:
        for sink in sinks:
            undo.callback(sink.close)
        made = Monitor(subject, every, sinks, consensus, first_step)
        undo.pop_all()
        return made


class Monitor:
    """A monitor that runs; :func:`monitor` makes it.

    Attributes:
        latest: On rank 0 the newest :class:`asyncddp.monitoring.Record` of each rank; elsewhere
            this rank's own.
        monitor_seconds: Time that this rank has spent on monitoring so far.
    """

    def __init__(
        self,
        subject: Subject,
        every: int,
        sinks: list[Sink],
        consensus: str | None,
        first_step: int,
    ) -> None:
        context = subject.context
        self._subject, self._every, self._sinks = subject, every, sinks
        self._consensus, self._step = consensus, first_step
        self._projection = Projection() if consensus == "projection" else None
        self.latest: dict[int, Record] = {}
        self._cost = Stopwatch()
        self._courier = Courier(context, subject.label)
        self._gathering = Gathering(context.size, _PATIENCE if subject.in_step else 0, _PATIENT)
        facts = [f"{subject.label!r}", f"every={every}", f"consensus={consensus!r}"]
        agree(context, "monitor needs the same on all ranks", [*facts, f"first_step={first_step}"])
        context.attachments.setdefault(MONITORS, {})[subject.label] = self
        context.farewells.append(self._farewell)
        self._pace = Pace(subject, self._cost, first_step)
        self._closed = False
        subject.attach(self._stepped, self._reports)
        if self._reports():
            subject.prepare()

    @property
    def monitor_seconds(self) -> float:
        """Time that this rank has spent on monitoring so far."""
        return self._cost.seconds

    @property
    def relative_error(self) -> float:
        """Standard error of the distances, relative to them; 0 where they are exact."""
        return 0.0 if self._projection is None else self._projection.relative_error

    # in the training loop

    def _reports(self) -> bool:
        """Whether the step under way will be reported."""
        return (self._step + 1) % self._every == 0

    def _stepped(self) -> None:
        self._step += 1
        if self._step % self._every == 0:
            with self._cost:
                self._courier.send(self._report())
        if self._reports():
            self._subject.prepare()
        if self._courier.arrived:
            with self._cost:
                self._take()

    def _report(self) -> Report:
        """What this rank has to say."""
        subject = self._subject
        pace = self._pace.lap(self._step)
        behind = [found.lag for found in subject.staleness().values()]
        record = Record(
            rank=subject.context.rank,
            step=self._step,
            time=time.time(),
            consensus_distance=self._exact_distance(),
            consensus_error=None if self._consensus is None else self.relative_error,
            gradient_norm=subject.gradient_norm(),
            step_seconds=pace.step,
            exposed_seconds=pace.exposed,
            monitor_seconds=pace.monitor,
            bytes_sent=subject.bytes_sent,
            staleness=None if subject.in_step else max([0, *behind]),
            departed=subject.departed,
        )
        self.latest[record.rank] = record
        return Report(record, self._projected())

    def _exact_distance(self) -> float | None:
        """The distance itself; collective."""
        if self._consensus != "exact":
            return None
        if not self._subject.all_ranks_step:
            raise UsageError(
                "monitor: consensus='exact' needs all ranks in every report, but inside join some "
                "are done before others; use consensus='projection'"
            )
        with use(self._subject.context):
            return math.sqrt(squared_deviation(self._subject.parameters))

    def _projected(self) -> Any:
        return None if self._projection is None else self._projection(self._subject.parameters)

    # on rank 0

    def _take(self) -> None:
        """Hand on what has come."""
        arrived = self._courier.arrived
        while arrived:
            one = arrived.popleft()
            complete = (
                self._gathering.leave(one) if isinstance(one, int) else self._gathering.add(one)
            )
            self._write(complete)

    def _write(self, complete: list[list[Record]]) -> None:
        for records in complete:
            self.latest.update({record.rank: record for record in records})
            for sink in self._sinks:
                sink.write(records)

    # the end

    def close(self, patience: float = 10.0) -> None:
        """Report no more; harmless when called twice.

        Rank 0 waits for the others' last reports until they have closed theirs or left; it goes on
        without those of whom it has heard nothing for so long, with a warning.

        Args:
            patience: Seconds without news for which rank 0 waits.
        """
        if self._closed:
            return
        self._closed = True
        subject = self._subject
        subject.detach()
        farewells = subject.context.farewells
        farewells[:] = [one for one in farewells if one != self._farewell]
        subject.context.attachments.get(MONITORS, {}).pop(subject.label, None)
        try:
            self._courier.end()
            if subject.context.rank == ROOT:
                self._await(patience)
                self._write(self._gathering.rest())
        finally:
            self._courier.close()
            for sink in self._sinks:
                sink.close()

    def _farewell(self) -> None:
        """The world ends, perhaps because something has failed."""
        self.close(_LAST_WORDS)

    def _await(self, patience: float) -> None:
        """Take what still comes."""
        transport, attempt, heard = self._subject.context.transport, 0, time.monotonic()
        while True:
            attempt = 0 if self._courier.attend() else attempt + 1
            if self._courier.arrived:
                heard = time.monotonic()
                self._take()
            missing = {r for r in self._gathering.there if not self._courier.gone(r)}
            if not missing:
                return
            if time.monotonic() - heard >= patience:
                break
            transport.rest(attempt)
        if patience:
            logger.warning(
                "monitor: closed while %s still train%s; close it on all ranks, or wait longer "
                "with close(patience=…)",
                list_ranks(missing),
                "s" * (len(missing) == 1),
            )

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(10.0 if error is None else 0.0)
