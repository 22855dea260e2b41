"""``init`` and ``shutdown``: join and leave the world of ranks."""

from __future__ import annotations

import atexit
import os
import sys

from asyncddp.config import Config
from asyncddp.context import crash_handler
from asyncddp.context.context import (
    Context,
    activate,
    current,
    in_local_world,
    is_initialized,
    refuse_forked,
)
from asyncddp.context.world_startup import open_world
from asyncddp.environments.launchers import launcher_rank_and_size
from asyncddp.environments.rank_process_marker import mark_rank, refuse_child_of_rank, unmark_rank
from asyncddp.errors import PeerError
from asyncddp.topology.builders import TopologyLike


def init(
    topology: TopologyLike | None = None,
    timeout: float | None = None,
    *,
    warn_after: float | None = None,
    check: bool | None = None,
    elastic: bool | None = None,
    transport: str | None = None,
    ranks_per_machine: int | None = None,
    timeline: str | os.PathLike[str] | None = None,
) -> None:
    """Join the world of ranks that ``asyncddp run``, ``torchrun``, ``mpirun`` or ``srun`` started.

    Calling it again is harmless: a topology that is given is set, all else stays. Inside
    :func:`local_world` the world exists already.

    Args:
        topology: Graph or schedule between ranks, a function of their number that makes it, or its
            name; ``exponential_two`` if not given.
        timeout: Seconds after which a wait raises; default ``ASYNCDDP_TIMEOUT`` or 600.
        warn_after: Seconds after which a wait warns; default ``ASYNCDDP_WARN_AFTER`` or 60.
        check: Confirm every exchange before it counts as done; default ``ASYNCDDP_CHECK`` or off.
        elastic: Let the other ranks go on where a rank dies; default ``ASYNCDDP_ELASTIC`` or off.
        transport: Name of the transport; default ``ASYNCDDP_TRANSPORT``, or that of the launcher:
            ``shared_memory`` where ranks are started by MPI, ``c10d`` where they are started by
            torchrun and its like, or ``torch.distributed`` is initialised. Both use shared memory
            among the ranks of a machine.
        ranks_per_machine: Simulate machines of so many ranks; default
            ``ASYNCDDP_RANKS_PER_MACHINE``, or the machines that there are.
        timeline: Folder or prefix of the timeline files of ranks; default
            ``ASYNCDDP_TIMELINE``, or no timeline is recorded.

    Raises:
        NotInitializedError: This process was forked from a rank.
        TopologyError: The topology does not fit the number of ranks.
        UnknownNameError: No transport has that name.
        ArgumentError: The timeline cannot be written where it shall be.
        EnvironmentProblem: The transport cannot be used here, or it knows of another number of
            ranks than the launcher has announced, or a rank has started this process; the message
            says why.
        WaitTimeoutError: Some ranks have not called it by the deadline.
        MismatchError: A setting that all ranks must share differs, or
            ``ASYNCDDP_DEVICE_TRANSPORTS`` is set, and some ranks see GPUs and others none.

    Example:
        >>> import asyncddp as bf
        >>> bf.init()
        >>> bf.rank(), bf.size()
        (0, 1)
        >>> bf.shutdown()
    """
    refuse_forked("init()")
    if not is_initialized():
        refuse_child_of_rank()
        config = Config.from_environment(
            timeout=timeout,
            warn_after=warn_after,
            check=check,
            elastic=elastic,
            transport=transport,
            ranks_per_machine=ranks_per_machine,
            timeline=timeline,
        )
        if launcher_rank_and_size()[1] > 1:
            # an error on one rank in here must not leave the others waiting
            crash_handler.install_crash_handler()
        context = Context(open_world(config), config)
        activate(context)
        crash_handler.install_crash_handler(context)
        atexit.register(_leave, context)
        if context.size > 1:
            mark_rank()
    if topology is not None:
        current().topologies.set(topology)


def shutdown() -> None:
    """Leave the world; harmless without one. ``init()`` may be called again afterwards.

    Inside :func:`local_world` it does nothing: the world ends with its ``with`` block.

    Raises:
        PeerError: A peer has refused something that had already counted as done here.

    Example:
        >>> import asyncddp as bf
        >>> bf.init()
        >>> bf.shutdown()
        >>> bf.is_initialized()
        False
    """
    if is_initialized() and not in_local_world():
        context = current()
        activate(None)
        atexit.unregister(_leave)
        unmark_rank()
        crash_handler.uninstall_crash_handler()
        context.close("it called shutdown()")


def _leave(context: Context) -> None:
    """Leave the world at the end of the script, so that no peer keeps waiting for this rank."""
    try:
        context.close("its script has ended")
    except PeerError as error:
        sys.excepthook(type(error), error, error.__traceback__)
