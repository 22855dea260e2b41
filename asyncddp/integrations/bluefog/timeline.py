"""The timeline's names. There is no timeline yet: nothing is recorded, and one warning says so."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["timeline_context", "timeline_end_activity", "timeline_start_activity", "warn_once"]

logger = logging.getLogger("asyncddp")


@functools.cache
def warn_once() -> None:
    """Say, once in a process, that nothing is recorded."""
    logger.warning(
        "there is no timeline yet, so that nothing is recorded; torch.profiler shows where time "
        "goes until then"
    )


def timeline_start_activity(tensor_name: str, activity_name: str) -> bool:
    """Record the begin of an activity, once there is a timeline.

    Args:
        tensor_name: The row that it shall be shown in.
        activity_name: What it is called.

    Returns:
        False: nothing was recorded, as in BlueFog where the timeline is off.
    """
    del tensor_name, activity_name
    warn_once()
    return False


def timeline_end_activity(tensor_name: str) -> bool:
    """Record the end of the row's last activity; False, as :func:`timeline_start_activity`."""
    del tensor_name
    warn_once()
    return False


@contextmanager
def timeline_context(tensor_name: str, activity_name: str) -> Iterator[None]:
    """Record what happens inside as one activity, once there is a timeline."""
    timeline_start_activity(tensor_name, activity_name)
    yield
    timeline_end_activity(tensor_name)
