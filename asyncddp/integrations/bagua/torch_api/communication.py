"""Bagua's ``bagua.torch_api.communication``: joining the world of ranks."""

from __future__ import annotations

from asyncddp.context import current, init, is_initialized
from asyncddp.context.context import in_local_world
from asyncddp.errors import ArgumentError, UsageError

__all__ = ["init_process_group", "is_initialized"]


def init_process_group(
    store: None = None, rank: int = -1, world_size: int = -1, local_world_size: int = -1
) -> None:
    """Join the world of ranks that a launcher has started; see :func:`asyncddp.init`.

    Args:
        store: None; ranks find each other through MPI.
        rank: This rank, if it is to be checked.
        world_size: The number of ranks, if it is to be checked.
        local_world_size: The number of ranks on this node, if it is to be checked.

    Raises:
        UsageError: It was called before.
        ArgumentError: A store, or a number that is not the launcher's.
        EnvironmentProblem: MPI cannot be used here.

    Example:
        >>> import asyncddp as bf
        >>> import asyncddp.integrations.bagua.torch_api as bagua
        >>> bagua.init_process_group()
        >>> bagua.is_initialized()
        True
        >>> bf.shutdown()
    """
    if store is not None:
        raise ArgumentError(
            "init_process_group: argument store: expected None, since ranks find each other "
            f"through MPI, got {type(store).__name__}"
        )
    if is_initialized() and not in_local_world():
        raise UsageError("init_process_group: it was called before; call it once on each rank")
    init()
    context = current()
    found = {"rank": (rank, context.rank), "world_size": (world_size, context.size)}
    found["local_world_size"] = local_world_size, context.local_size
    for name, (given, actual) in found.items():
        if given not in (-1, actual):
            raise ArgumentError(
                f"init_process_group: argument {name}: expected {actual} or -1, as the launcher "
                f"has started the ranks, got {given}"
            )
