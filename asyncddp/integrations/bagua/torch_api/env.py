"""Bagua's ``bagua.torch_api.env``: ranks and numbers of ranks, also before initialisation."""

from __future__ import annotations

from asyncddp.config import read_variable, whole_number
from asyncddp.context import is_initialized, ranks_and_topology
from asyncddp.environments.launchers import announced

__all__ = [
    "get_autotune_level", "get_default_bucket_size", "get_local_rank", "get_local_size",
    "get_node_rank", "get_rank", "get_world_size", "is_report_metrics_switch_on",
]  # fmt: skip

_DEFAULT_BUCKET_SIZE = 10 << 20


def get_rank() -> int:
    """Return this rank; before ``init_process_group()`` that of the launcher's variables, or 0.

    Example:
        >>> import asyncddp.integrations.bagua.torch_api as bagua
        >>> bagua.get_rank(), bagua.get_world_size(), bagua.get_local_rank()
        (0, 1, 0)
    """
    return ranks_and_topology.rank() if is_initialized() else _announced("RANK", 0)


def get_world_size() -> int:
    """Return the number of ranks; see :func:`get_rank`."""
    return ranks_and_topology.size() if is_initialized() else _announced("WORLD_SIZE", 1)


def get_local_rank() -> int:
    """Return this rank's number on its node; see :func:`get_rank`."""
    return ranks_and_topology.local_rank() if is_initialized() else _announced("LOCAL_RANK", 0)


def get_local_size() -> int:
    """Return the number of ranks on this node; see :func:`get_rank`."""
    if is_initialized():
        return ranks_and_topology.local_size()
    return _announced("LOCAL_WORLD_SIZE", 1)


def get_node_rank() -> int:
    """Return the number of this node; see :func:`get_rank`."""
    return ranks_and_topology.machine_rank() if is_initialized() else _announced("NODE_RANK", 0)


def get_default_bucket_size() -> int:
    """Return the size that closes a bucket: ``BAGUA_DEFAULT_BUCKET_SIZE`` bytes, or 10 MiB."""
    return _number("BAGUA_DEFAULT_BUCKET_SIZE", _DEFAULT_BUCKET_SIZE, least=1)


def get_autotune_level() -> int:
    """Return ``BAGUA_AUTOTUNE``, by default 0.

    With 1 ``GradientAllReduceAlgorithm`` searches for its fastest settings, by
    :class:`asyncddp.Autotune`, and the old API reports its speed.
    """
    return _number("BAGUA_AUTOTUNE", 0)


def is_report_metrics_switch_on() -> bool:
    """Return True if ``BAGUA_REPORT_METRICS`` is 1: the old API then reports its speed."""
    return _number("BAGUA_REPORT_METRICS", 0) == 1


def _announced(name: str, default: int) -> int:
    found = read_variable(name, str) or announced(name)
    return default if found is None else int(found)


def _number(name: str, default: int, least: int = 0) -> int:
    parse = whole_number(least)
    found = read_variable(name, lambda text: parse(text) if text else default)
    return default if found is None else found
