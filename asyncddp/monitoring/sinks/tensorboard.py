"""Sink that writes monitor reports as TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncddp.errors import EnvironmentProblem
from asyncddp.install_commands import install_command
from asyncddp.monitoring.rank_record import Record

_NOT_SCALARS = ("rank", "step", "time", "consensus_error", "departed")


class TensorBoardSink:
    """Sink that adds each rank's figures to a ``SummaryWriter``, and closes it if it owns it."""

    def __init__(self, writer: Any, *, own: bool = False) -> None:
        self._writer, self._own = writer, own

    def write(self, records: Sequence[Record]) -> None:
        """Add the figures that are known."""
        for record in records:
            for name, value in record.as_dict().items():
                if name not in _NOT_SCALARS and value is not None:
                    tag = f"asyncddp/{name}/rank {record.rank}"
                    self._writer.add_scalar(tag, value, record.step, record.time)

    def close(self) -> None:
        """Flush the writer."""
        self._writer.flush()
        if self._own:
            self._writer.close()


def open_summary_writer(folder: str) -> Any:
    """Open a writer of TensorBoard event files."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise EnvironmentProblem(
            f"monitor: 'tensorboard:{folder}' needs TensorBoard ({error}); install it with "
            + install_command("monitor")
        ) from error
    return SummaryWriter(folder)
