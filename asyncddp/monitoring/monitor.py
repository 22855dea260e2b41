"""``monitor``: collects reports of all ranks' training progress on rank 0."""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from typing import Any

from asyncddp.algorithms.cumulative_timer import CumulativeTimer
from asyncddp.context.context import use
from asyncddp.errors import UsageError
from asyncddp.monitoring.random_projection import RandomProjection
from asyncddp.monitoring.rank_record import Record
from asyncddp.monitoring.report_collector import (
    ROOT,
    RankStepReport,
    ReportCollector,
    ReportExchange,
)
from asyncddp.monitoring.sinks import Sink, sink_constructors
from asyncddp.monitoring.watched_model_adapters import MONITORS_KEY, MonitorTarget, find_target
from asyncddp.ops.settings_agreement import require_equal_on_all_ranks
from asyncddp.optim.average_models import squared_deviation
from asyncddp.rank_list_text import list_ranks
from asyncddp.tensors.allocation import make_tensor

logger = logging.getLogger("asyncddp")

_PATIENCE, _PATIENCE_SECONDS = 2, 1.0  # a step waits for so many reports that are so much later
_SHUTDOWN_PATIENCE = 2.0  # seconds


def monitor(
    watched: Any,
    every: int = 50,
    to: Any = "console",
    consensus: str | None = "projection",
    *,
    first_step: int = 0,
) -> Monitor:
    r"""Report the training progress of all ranks at regular numbers of steps.

    Of each rank: the consensus distance :math:`\lVert x_i - \bar x \rVert_2`, the gradient norm,
    the time of a step and how much of it averaging and monitoring took, the bytes sent, and with
    one-sided methods the staleness and the neighbours that have left; see
    :class:`asyncddp.monitoring.Record`. Every rank sends its figures to rank 0 by a one-sided
    message, so that nobody waits for anybody; rank 0 writes them while it makes its own steps.

    The distance is found from 64 numbers of each rank, a random projection of its parameters that
    is the same on all, with a relative standard error of :math:`1/\sqrt{2 \cdot 64} \approx 9\,\%`.
    With ranks that go in step, projections of the same step are compared; with one-sided methods
    each with the newest of the others.

    Where replicas are sharded, a record is of a whole replica, whose number is its rank; times and
    staleness are those of its first part. The first rank of replica 0 writes.

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
        ...     alone = {"communication": "empty", "broadcast": False}
        ...     optimizer = bf.DistributedOptimizer(optimizer, model, **alone)
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
    target = find_target(watched)
    target.check_arguments(every, consensus, first_step)
    constructors = sink_constructors(to, append=first_step > 0)
    with ExitStack() as undo:
        sinks: list[Sink] = []
        for open_sink in constructors if target.writes else ():
            sinks.append(open_sink())
            undo.callback(sinks[-1].close)
        made = Monitor(target, every, sinks, consensus, first_step)
        undo.pop_all()
        return made


class Monitor:
    """Running monitor that reports a training run's progress; created by :func:`monitor`.

    Attributes:
        latest: On rank 0 the newest :class:`asyncddp.monitoring.Record` of each rank; elsewhere
            this rank's own.
    """

    def __init__(
        self,
        target: MonitorTarget,
        every: int,
        sinks: list[Sink],
        consensus: str | None,
        first_step: int,
    ) -> None:
        context = target.context
        self._target, self._every, self._sinks = target, every, sinks
        self._consensus, self._step = consensus, first_step
        part = 0 if target.inner is None else target.inner.context.rank
        self._projection = RandomProjection(seed=part) if consensus == "projection" else None
        self.latest: dict[int, Record] = {}
        self._cost = CumulativeTimer()
        self._reports = ReportExchange(context, target.label)
        self._collector = ReportCollector(
            context.size, _PATIENCE if target.in_step else 0, _PATIENCE_SECONDS
        )
        facts = [f"{target.label!r}", f"every={every}", f"consensus={consensus!r}"]
        require_equal_on_all_ranks(
            context, "monitor needs the same on all ranks", [*facts, f"first_step={first_step}"]
        )
        context.extensions.setdefault(MONITORS_KEY, {})[target.label] = self
        context.exit_callbacks.append(self._on_shutdown)
        self._last_times = self._times()
        self._closed = False
        target.attach(self._on_step, self._is_reported)
        if self._is_reported():
            target.prepare()

    @property
    def monitor_seconds(self) -> float:
        """Time that this rank has spent on monitoring so far."""
        return self._cost.seconds

    @property
    def relative_error(self) -> float:
        """Relative standard error of the consensus distances; 0 if they are exact."""
        return 0.0 if self._projection is None else self._projection.relative_error

    def _is_reported(self) -> bool:
        """Return True if the current step will be reported."""
        return (self._step + 1) % self._every == 0

    def _on_step(self) -> None:
        self._step += 1
        if self._step % self._every == 0:
            with self._cost:
                self._reports.send(self._report())
        if self._is_reported():
            self._target.prepare()
        if self._reports.arrived:
            with self._cost:
                self._process_arrived()

    def _times(self) -> tuple[int, float, float, float]:
        """Return the step count and the seconds so far: in total, averaging, and monitoring."""
        exposed = self._target.averager.exposed_time.seconds
        return self._step, time.perf_counter(), exposed, self._cost.seconds

    def _report(self) -> RankStepReport:
        target = self._target
        times, last = self._times(), self._last_times
        steps, *seconds = (one - other for one, other in zip(times, last, strict=True))
        step_seconds, exposed_seconds, monitor_seconds = (second / steps for second in seconds)
        self._last_times = times
        norm = target.gradient_norm()
        sent, square, gradient, known = target.whole(
            [target.averager.bytes_sent, self._exact_square(), (norm or 0.0) ** 2, norm is not None]
        )
        behind = [found.lag for found in target.watched.staleness().values()]
        record = Record(
            rank=target.context.rank,
            step=self._step,
            time=time.time(),
            consensus_distance=math.sqrt(square) if self._consensus == "exact" else None,
            consensus_error=None if self._consensus is None else self.relative_error,
            gradient_norm=math.sqrt(gradient) if known else None,
            step_seconds=step_seconds,
            exposed_seconds=exposed_seconds,
            monitor_seconds=monitor_seconds,
            bytes_sent=int(sent),
            staleness=None if target.in_step else max([0, *behind]),
            departed=target.watched.departed,
        )
        self.latest[record.rank] = record
        project = self._projection
        projection = None if project is None else project(target.parts)
        if projection is not None and target.inner is not None:
            projection = make_tensor(target.whole(projection.tolist()), projection.dtype)
        return RankStepReport(record, projection)

    def _exact_square(self) -> float:
        """Compute this rank's part of the exact squared distance; 0 unless wanted; collective."""
        if self._consensus != "exact":
            return 0.0
        if self._target.averager.join_coordinator is not None:
            raise UsageError(
                "monitor: consensus='exact' needs all ranks in every report, but inside join some "
                "are done before others; use consensus='projection'"
            )
        with use(self._target.context):
            return squared_deviation(self._target.parts)

    def _process_arrived(self) -> None:
        collector, arrived = self._collector, self._reports.arrived
        while arrived:
            one = arrived.popleft()
            self._write(collector.remove(one) if isinstance(one, int) else collector.add(one))

    def _write(self, complete: list[list[Record]]) -> None:
        for records in complete:
            self.latest.update({record.rank: record for record in records})
            for sink in self._sinks:
                sink.write(records)

    def close(self, patience: float = 10.0) -> None:
        """Stop reporting; harmless when called twice.

        Rank 0 waits for the other ranks' last reports until they have closed their monitors or
        left. It warns and stops waiting after ``patience`` seconds without a report.
        """
        if self._closed:
            return
        self._closed = True
        target = self._target
        target.detach()
        exit_callbacks = target.context.exit_callbacks
        exit_callbacks[:] = [one for one in exit_callbacks if one != self._on_shutdown]
        target.context.extensions.get(MONITORS_KEY, {}).pop(target.label, None)
        try:
            self._reports.end()
            if target.context.rank == ROOT:
                self._await_reports(patience)
                self._write(self._collector.drain())
        finally:
            self._reports.close()
            for sink in self._sinks:
                sink.close()

    def _on_shutdown(self) -> None:
        """Close the monitor when the context shuts down, possibly after a failure."""
        self.close(_SHUTDOWN_PATIENCE)

    def _await_reports(self, patience: float) -> None:
        transport, attempt, heard = self._target.context.transport, 0, time.monotonic()
        while True:
            attempt = 0 if self._target.context.engine.progress() else attempt + 1
            if self._reports.arrived:
                heard = time.monotonic()
                self._process_arrived()
            missing = {r for r in self._collector.active if not self._reports.has_left(r)}
            if not missing:
                return
            if time.monotonic() - heard >= patience:
                break
            transport.backoff(attempt)
        if patience:
            logger.warning(
                "monitor: closed while %s still train%s; close it on all ranks, or wait longer "
                "with close(patience=…)",
                list_ranks(missing),
                "s" * (len(missing) == 1),
            )

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(10.0 if kind is None else 0.0)
