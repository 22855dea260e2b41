"""Readers of the ``BLUEFOG_…`` environment variables, and a warning about unsupported ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from asyncddp.config import read_variable, whole_number

logger = logging.getLogger("asyncddp")

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}

_TRANSPORT = "ASYNCDDP_TRANSPORT names the transport"
_NOTHING = "nothing, there is no such thing to tune"
_NO_RESTART = "nothing: what waits too long raises, and no process starts itself anew"

_INSTEAD = {
    "BLUEFOG_LOG_HIDE_TIME": "a logging.Formatter on the logger 'asyncddp'",
    "BLUEFOG_CYCLE_TIME": _NOTHING,
    "BLUEFOG_FUSION_THRESHOLD": "bucket_size_in_mb of asyncddp.DistributedOptimizer",
    "BLUEFOG_MPI_THREAD_LEVEL": "mpi4py.rc.thread_level before bf.init()",
    "BLUEFOG_OPS_ON_CPU": _TRANSPORT,
    "BLUEFOG_WIN_ON_GPU": _NOTHING,
    "BLUEFOG_ALLREDUCE_BY_MPI": _TRANSPORT,
    "BLUEFOG_ALLGATHER_BY_MPI": _TRANSPORT,
    "BLUEFOG_BROADCAST_BY_MPI": _TRANSPORT,
    "BLUEFOG_NEIGHBOR_ALLREDUCE_BY_MPI": _TRANSPORT,
    "BLUEFOG_NEIGHBOR_ALLGATHER_BY_MPI": _TRANSPORT,
    "BLUEFOG_WIN_OPS_BY_MPI": _TRANSPORT,
    "BLUEFOG_MAX_WIN_SENT_LENGTH": "nothing: each put is read whole",
    "BLUEFOG_NUM_FINALIZER_THREADS": _NOTHING,
    "BLUEFOG_SLEEP_USEC_FOR_WIN_PASSIVE": _NOTHING,
    "BLUEFOG_START_TIMEOUT": "asyncddp run --help",
    "BLUEFOG_USE_UCX": "asyncddp run --help",
    "BLUEFOG_WIN_TIMEOUT_S": "ASYNCDDP_TIMEOUT",
    "BLUEFOG_WIN_WARN_AFTER_S": "ASYNCDDP_WARN_AFTER",
    "BLUEFOG_WIN_RESTART_RETRIES": _NO_RESTART,
    "BLUEFOG_WIN_DISABLE_RESTART": _NO_RESTART,
}


def read_ranks_per_machine(environ: Mapping[str, str] | None = None) -> int | None:
    """Read ``BLUEFOG_NODES_PER_MACHINE``: the number of ranks on each simulated machine."""
    return read_variable("BLUEFOG_NODES_PER_MACHINE", whole_number(1), environ)


def timeline(environ: Mapping[str, str] | None = None) -> str | None:
    """Read ``BLUEFOG_TIMELINE``, a file name prefix, and return the pattern of timeline files."""
    prefix = read_variable("BLUEFOG_TIMELINE", str, environ)
    return f"{prefix}{{rank}}.json" if prefix else None


def read_log_level(environ: Mapping[str, str] | None = None) -> None:
    """Read ``BLUEFOG_LOG_LEVEL`` and set the level of the logger ``asyncddp``."""
    level = read_variable("BLUEFOG_LOG_LEVEL", _parse_level, environ)
    if level is not None:
        logger.setLevel(level)


def _parse_level(text: str) -> int:
    if text.lower() not in _LEVELS:
        raise ValueError(f"one of {', '.join(_LEVELS)}")
    return _LEVELS[text.lower()]


def warn_of_others(environ: Mapping[str, str] | None = None) -> None:
    """Log one warning that lists ignored variables of BlueFog with their replacements."""
    found = [name for name in _INSTEAD if read_variable(name, str, environ) is not None]
    if found:
        listed = "; ".join(f"{name}: {_INSTEAD[name]}" for name in found)
        logger.warning("variables of BlueFog that are not read, and what to use: %s", listed)
