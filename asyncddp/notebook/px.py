"""``%%px`` on the ranks of a cluster: ipyparallel's, with each error shown once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TextIO

from ipyparallel.client.magics import ParallelMagics
from ipyparallel.error import RemoteError

from asyncddp.notebook.folding import Failure, folded

if TYPE_CHECKING:
    from asyncddp.notebook.cluster import Cluster

__all__ = ["CellMagics"]

_AT_ONCE = 0.5  # seconds before what is printed is shown as it comes
_OUTPUT = 1.0  # seconds for what was printed to arrive after the results have


class CellMagics(ParallelMagics):  # type: ignore[misc]  # ipyparallel has no types
    """``%px``, ``%%px``, ``%pxresult`` and ``%autopx`` for one cluster.

    Args:
        shell: The IPython session.
        cluster: The cluster.
    """

    def __init__(self, shell: Any, cluster: Cluster) -> None:
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
        """Run a cell on the ranks; the arguments are ipyparallel's.

        Raises:
            RankError: It raised on some ranks; each error is there once, with its ranks.
        """
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
        self._raise(result, [targets] if isinstance(targets, int) else list(targets))
        return None

    def _show(self, result: Any, groupby: str, *, stream: bool) -> None:
        """Wait for the end, and show what the ranks print; in their order, if it comes at once."""
        streamed = False
        try:
            result.wait(_AT_ONCE)
            streamed = stream and not result.done()
            with self._streamed(result) if streamed else nullcontext():
                result.wait()
                result.wait_for_output(_OUTPUT)
        except KeyboardInterrupt:
            self._cluster.interrupt()
            result.wait(_OUTPUT)
            if not result.done():
                raise
            result.wait_for_output(_OUTPUT)
        result._display_stream = _whole
        result.display_outputs(groupby, result_only=streamed)

    def _streamed(self, result: Any) -> AbstractContextManager[None]:
        """Show what the ranks print as it comes, and leave errors and values to the end."""
        shown = result._iopub_streaming_output_callback
        result._iopub_streaming_output_callback = functools.partial(_but_the_end, shown)
        stream: AbstractContextManager[None] = result.stream_output()
        return stream

    def _raise(self, result: Any, ranks: Sequence[int]) -> None:
        found = result.get(return_exceptions=True)
        every = found if isinstance(found, list) else [found]
        failures = [
            Failure(rank, one.ename, str(one.evalue), (one.traceback or "").splitlines())
            for rank, one in zip(ranks, every, strict=True)
            if isinstance(one, RemoteError)
        ]
        if failures:
            self._cluster.after_errors(died=any(f.name == "EngineError" for f in failures))
            raise folded(failures)


def _whole(text: str, prefix: str = "", file: TextIO | None = None) -> None:
    """Show all that a rank has printed as it looks where it is shown as it comes."""
    if text:
        end = "" if text.endswith("\n") else "\n"
        (file or sys.stdout).write(f"{prefix}{text}{end}")


def _but_the_end(show: Any, rank: int, future: Any, message: Any) -> None:
    if message["header"]["msg_type"] not in {"error", "execute_result"}:
        # What had come before has no parent; with it, what comes later is shown in its place.
        show(rank, future, {"parent_header": {"msg_id": future.msg_id}, **message})
