"""``broadcast_object`` and ``allgather_object``: anything that pickle can carry.

Pickle runs what it reads, so it is for users' objects alone; the library tells its own facts to all
ranks by :func:`gather_records`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from asyncddp.context import Context, current
from asyncddp.engine import Desk, Form, Program, Steps
from asyncddp.memory.allocate import empty, values
from asyncddp.memory.packing import pack, unpack
from asyncddp.memory.views import as_bytes, from_bytes
from asyncddp.ops.allgather import gather_over
from asyncddp.ops.door import check_rank
from asyncddp.ops.forms import nonblocking, verb

__all__ = [
    "allgather_object",
    "allgather_object_nonblocking",
    "broadcast_object",
    "broadcast_object_nonblocking",
    "gather_records",
]

T = TypeVar("T")


@verb
def broadcast_object(
    obj: Any = None, root_rank: int = 0, *, name: str | None = None
) -> Program[Any]:
    """Give all ranks the root's object, by pickle.

    Args:
        obj: The object; only the root's counts.
        root_rank: The root, the same on all ranks.
        name: For messages; all ranks must give the same.

    Returns:
        A copy of the root's object; on the root the object itself.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: There is no such root.
        MismatchError: Another rank names another root, or calls another collective.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: bf.broadcast_object({"lr": 0.1} if bf.rank() == 0 else None))
        [{'lr': 0.1}, {'lr': 0.1}]
    """
    context = current()
    root = check_rank("broadcast_object", "root_rank", root_rank, context.size)
    form = Form(f"broadcast_object(root_rank={root})" + (f" {name!r}" if name else ""), "uint8", ())
    here = context.rank == root
    data = _pickled(obj) if here else empty((0,), torch.uint8)

    def steps(desk: Desk) -> Steps[Any]:
        """Send the size of the root's object, then the object."""
        everyone, wire = range(context.size), context.transport
        length = values([data.numel()], torch.int64)
        yield from desk.collective(everyone, form, lambda: wire.ibroadcast(length, root))
        value = data if here else empty((int(length),), torch.uint8)
        yield from desk.collective(everyone, form, lambda: wire.ibroadcast(value, root))
        return obj if here else _unpickled(value)

    return Program("broadcast_object", steps, name, ordered=True)


@verb
def allgather_object(obj: Any, *, name: str | None = None) -> Program[list[Any]]:
    """Give all ranks the list of all ranks' objects, by pickle.

    Args:
        obj: This rank's object.
        name: For messages; all ranks must give the same.

    Returns:
        The objects in the order of the ranks, all of them copies.

    Raises:
        NotInitializedError: ``init()`` was not called.
        MismatchError: Another rank calls another collective.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: bf.allgather_object("ab"[bf.rank()]))[0]
        ['a', 'b']
    """
    title = "allgather_object" + (f" {name!r}" if name else "")
    data = _pickled(obj)
    return _gathering(
        current(), "allgather_object", title, name, data, lambda _, part: _unpickled(part)
    )


def gather_records(mine: T, kind: type[T], verb: str) -> list[T]:
    """Give all ranks the list of all ranks' facts, which are not pickled; collective.

    Args:
        mine: This rank's: numbers, strings, None, and lists, mappings or records of them.
        kind: The type to which all of them must belong.
        verb: On whose behalf, for messages; the same on all ranks.

    Raises:
        PeerError: A rank has sent something else.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: gather_records([bf.rank()], list[int], "example"))[0]
        [[0], [1]]
    """

    def read(peer: int, part: torch.Tensor) -> T:
        """Read what a rank says."""
        return unpack(as_bytes(part).numpy().tobytes(), kind, f"{verb}: what rank {peer} says")

    packed = pack(mine)
    data = from_bytes(packed, torch.uint8, (len(packed),))
    context = current()
    return context.engine.run(_gathering(context, verb, verb, None, data, read))


def _gathering(
    context: Context,
    verb: str,
    title: str,
    name: str | None,
    data: torch.Tensor,
    read: Callable[[int, torch.Tensor], T],
) -> Program[list[T]]:
    def steps(desk: Desk) -> Steps[list[T]]:
        """Gather sizes, then objects."""
        everyone, wire = range(context.size), context.transport
        length = values([data.numel()], torch.int64)
        lengths = yield from gather_over(desk, everyone, wire, length, title)
        whole = yield from gather_over(desk, everyone, wire, data, title)
        return [read(peer, part) for peer, part in enumerate(torch.split(whole, lengths.tolist()))]

    return Program(verb, steps, name, ordered=True)


broadcast_object_nonblocking = nonblocking(broadcast_object)
allgather_object_nonblocking = nonblocking(allgather_object)


def _pickled(obj: Any) -> torch.Tensor:
    data = pickle.dumps(obj, protocol=5)
    return from_bytes(data, torch.uint8, (len(data),))


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(as_bytes(data).numpy().tobytes())
