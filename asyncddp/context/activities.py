"""Activities of the user's own in the timeline."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from asyncddp.context.context import current, is_initialized
from asyncddp.timeline.recorder import Recorder

__all__ = ["timeline_context", "timeline_end_activity", "timeline_start_activity"]

logger = logging.getLogger("asyncddp")


@cache
def complain_once() -> None:
    """Say, once in a process, that nothing is noted."""
    logger.error(
        "the timeline is off, so that no activity is noted; set ASYNCDDP_TIMELINE, or start with "
        "asyncddp run --timeline DIR"
    )


def _recorder() -> Recorder | None:
    recorder = current().recorder if is_initialized() else None
    if recorder is None:
        complain_once()
    return recorder


def timeline_start_activity(tensor_name: str, activity_name: str) -> bool:
    """Note that an activity begins; activities of one thread and row nest.

    Args:
        tensor_name: The row that it is shown in.
        activity_name: What it is called.

    Returns:
        True; False where the timeline is off, which one error in the log says.

    Example:
        >>> import asyncddp as bf, tempfile
        >>> def loads():
        ...     begun = bf.timeline_start_activity("batch", "LOAD")
        ...     return begun, bf.timeline_end_activity("batch")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with bf.local_world(1, timeline=folder) as world:
        ...         world.run(loads)
        [(True, True)]
    """
    recorder = _recorder()
    return recorder is not None and recorder.start_activity(tensor_name, activity_name)


def timeline_end_activity(tensor_name: str) -> bool:
    """Note that the last activity of a row ends, which :func:`timeline_start_activity` began.

    Args:
        tensor_name: The row.

    Returns:
        True; False where none has begun, or the timeline is off.
    """
    recorder = _recorder()
    return recorder is not None and recorder.end_activity(tensor_name)


@contextmanager
def timeline_context(tensor_name: str, activity_name: str) -> Iterator[None]:
    """Note what happens inside as one activity; see :func:`timeline_start_activity`.

    Args:
        tensor_name: The row that it is shown in.
        activity_name: What it is called.
    """
    timeline_start_activity(tensor_name, activity_name)
    try:
        yield
    finally:
        timeline_end_activity(tensor_name)
