"""IPython magics ``%px`` and ``%%px``, which run notebook cells on the ranks of a cluster."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO, cast

from ipyparallel.client.magics import ParallelMagics
from ipyparallel.error import RemoteError

from asyncddp.notebook.error_grouping import CellFailure, group_failures

_STREAM_AFTER = 0.5  # seconds after which printed output is streamed
_OUTPUT_TIMEOUT = 1.0  # seconds for printed output to arrive after the results


class ClusterCellMagics(ParallelMagics):  # type: ignore[misc]  # ipyparallel has no types
    """IPython magics ``%px``, ``%%px``, ``%pxresult`` and ``%autopx`` for a cluster's ranks."""

    def __init__(self, shell: Any, cluster: Any) -> None:  # a Cluster, whose module imports this
        super().__init__(shell, cluster.view)
        self._cluster = cluster

    def parallel_execute(
        self,
        cell: str,
        block: bool | None = None,
        groupby: str = "type",
        save_name: str | None = None,
        stream_output: bool | None = None,
        progress_after: float | None = None,
        signal_on_interrupt: str | None = None,
    ) -> Any:
        """Run a cell on the ranks; raise equal errors of several ranks as one RankError."""
        del progress_after, signal_on_interrupt  # the notebook shows what runs; Ctrl-C interrupts
        self._cluster.check()
        targets = self.view.targets
        result = self.view.execute(cell, silent=False, block=False)
        result._fname = "%px"
        self.last_result = result
        if save_name:
            self.shell.user_ns[save_name] = result
        if not (self.view.block if block is None else block):
            return result
        stream = self.stream_output if stream_output is None else stream_output
        self._show(result, groupby, stream=stream)
        self._raise_failures(result, [targets] if isinstance(targets, int) else list(targets))
        return None

    def _show(self, result: Any, groupby: str, *, stream: bool) -> None:
        """Wait for the cell and show its output, in rank order if the cell ends quickly."""
        streamed = False
        try:
            result.wait(_STREAM_AFTER)
            streamed = stream and not result.done()
            with self._stream_output(result) if streamed else nullcontext():
                result.wait()
                result.wait_for_output(_OUTPUT_TIMEOUT)
        except KeyboardInterrupt:
            self._cluster.interrupt()
            result.wait(_OUTPUT_TIMEOUT)
            if not result.done():
                raise
            result.wait_for_output(_OUTPUT_TIMEOUT)
        result._display_stream = _write_output
        result.display_outputs(groupby, result_only=streamed)

    def _stream_output(self, result: Any) -> AbstractContextManager[None]:
        """Stream the ranks' printed output; show errors and values at the end."""
        shown = result._iopub_streaming_output_callback
        result._iopub_streaming_output_callback = functools.partial(_forward_printed, shown)
        return cast("AbstractContextManager[None]", result.stream_output())

    def _raise_failures(self, result: Any, ranks: Sequence[int]) -> None:
        found = result.get(return_exceptions=True)
        every = found if isinstance(found, list) else [found]
        failures = [
            CellFailure(rank, one.ename, str(one.evalue), (one.traceback or "").splitlines())
            for rank, one in zip(ranks, every, strict=True)
            if isinstance(one, RemoteError)
        ]
        if failures:
            self._cluster.after_errors(died=any(f.name == "EngineError" for f in failures))
            raise group_failures(failures)


def _write_output(text: str, prefix: str = "", file: TextIO | None = None) -> None:
    """Write a rank's complete output in the format of streamed output."""
    if text:
        end = "" if text.endswith("\n") else "\n"
        (file or sys.stdout).write(f"{prefix}{text}{end}")


def _forward_printed(show: Any, rank: int, future: Any, message: Any) -> None:
    if message["header"]["msg_type"] not in {"error", "execute_result"}:
        # What had come before has no parent; with it, what comes later is shown in its place.
        show(rank, future, {"parent_header": {"msg_id": future.msg_id}, **message})
