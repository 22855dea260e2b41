"""Public functions that record named activities of the user's program in the timeline."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from asyncddp.context.context import current, is_initialized
from asyncddp.timeline.tracer import Tracer

logger = logging.getLogger("asyncddp")


@cache
def warn_timeline_off_once() -> None:
    """Log, once per process, that the timeline is off."""
    logger.error(
        "the timeline is off, so that no activity is noted; set ASYNCDDP_TIMELINE, or start with "
        "asyncddp run --timeline DIR"
    )


def _tracer() -> Tracer | None:
    tracer = current().tracer if is_initialized() else None
    if tracer is None:
        warn_timeline_off_once()
    return tracer


def timeline_start_activity(tensor_name: str, activity_name: str) -> bool:
    """Record the begin of an activity; activities of one thread and row nest.

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
    tracer = _tracer()
    return tracer is not None and tracer.start_activity(tensor_name, activity_name)


def timeline_end_activity(tensor_name: str) -> bool:
    """Record the end of a row's last activity, begun by :func:`timeline_start_activity`.

    Args:
        tensor_name: The row.

    Returns:
        True; False where none has begun, or the timeline is off.
    """
    tracer = _tracer()
    return tracer is not None and tracer.end_activity(tensor_name)


@contextmanager
def timeline_context(tensor_name: str, activity_name: str) -> Iterator[None]:
    """Record the ``with`` block as one activity; see :func:`timeline_start_activity`.

    Args:
        tensor_name: The row that it is shown in.
        activity_name: What it is called.
    """
    timeline_start_activity(tensor_name, activity_name)
    try:
        yield
    finally:
        timeline_end_activity(tensor_name)
