"""``broadcast_object`` and ``allgather_object``: collectives of pickled Python objects.

Pickle executes its input, so only users' objects use it; the library uses :func:`gather_records`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from asyncddp.engine import (
    ExchangeSignature,
    OperationExchanges,
    OperationSpec,
    StartedCollective,
    Steps,
)
from asyncddp.ops.allgather import start_gathering
from asyncddp.ops.broadcast import broadcast_in_group
from asyncddp.ops.group_exchange import exchange_all_gather
from asyncddp.ops.process_group import (
    CollectiveImplementations,
    ProcessGroup,
    check_member,
    members_of,
)
from asyncddp.ops.variants import blocking, nonblocking, run_planned
from asyncddp.serialization import pack, unpack
from asyncddp.tensors.allocation import empty, make_tensor
from asyncddp.tensors.byte_views import from_bytes, to_bytes

T = TypeVar("T")


@blocking
def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    *,
    group: ProcessGroup | None = None,
    name: str | None = None,
) -> OperationSpec[Any]:
    """Broadcast the root's Python object to all ranks, or to those of a group, by pickle.

    Args:
        obj: The object; only the root's is used.
        root_rank: The root's rank in the world, the same on all ranks.
        group: The ranks that take part, from :func:`~asyncddp.new_group`; all if None.
        name: For messages; all ranks must give the same.

    Returns:
        A copy of the root's object; on the root the object itself.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: There is no such root; it or this rank is not in ``group``.
        MismatchError: Another rank names another root, or calls another collective.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: bf.broadcast_object({"lr": 0.1} if bf.rank() == 0 else None))
        [{'lr': 0.1}, {'lr': 0.1}]
    """
    members = members_of("broadcast_object", group)
    root = check_member("broadcast_object", "root_rank", root_rank, members)
    title = f"broadcast_object(root_rank={root})" + (f" {name!r}" if name else "")
    here, place = members.context.rank == root, members.ranks.index(root)
    data = _pickled(obj) if here else empty((0,), torch.uint8)
    size = make_tensor([data.numel()], torch.int64)

    def messages(op: OperationExchanges, own: torch.Tensor) -> Steps[Any]:
        length = yield from broadcast_in_group(op, members.ranks, root, size, title)
        value = own if here else empty((int(length),), torch.uint8)
        value = yield from broadcast_in_group(op, members.ranks, root, value, title)
        return obj if here else _unpickled(value)

    def start(sizes: Sequence[torch.Tensor], *_: object) -> StartedCollective[Any]:
        assert members.transport is not None
        length = torch.cat(list(sizes))[place]
        value = data if here else empty((int(length),), torch.uint8)
        request = members.transport.ibroadcast(value, place)
        return StartedCollective(request, lambda: obj if here else _unpickled(value))

    def combine(parts: Sequence[torch.Tensor], *_: object) -> Any:
        return obj if here else _unpickled(parts[place])

    form = ExchangeSignature(title, "uint8", (None,))
    ways = CollectiveImplementations(combine, start, size, gives=here)
    return members.collective("broadcast_object", form, (data, None), messages, ways, name)


@blocking
def allgather_object(
    obj: Any, *, group: ProcessGroup | None = None, name: str | None = None
) -> OperationSpec[list[Any]]:
    """Gather the Python objects of all ranks, or of a group, in a list on each rank, by pickle.

    Args:
        obj: This rank's object.
        group: The ranks that take part, from :func:`~asyncddp.new_group`; all if None.
        name: For messages; all ranks must give the same.

    Returns:
        The objects in the order of the ranks, all of them copies.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: This rank is not in ``group``.
        MismatchError: Another rank calls another collective.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: bf.allgather_object("ab"[bf.rank()]))[0]
        ['a', 'b']
    """
    members = members_of("allgather_object", group)
    return _gathering(members, "allgather_object", name, _pickled(obj), lambda _, p: _unpickled(p))


def gather_records(mine: T, kind: type[T], verb: str) -> list[T]:
    """Gather a plain record from each rank on all ranks, without pickle; collective.

    A record is a number, string or None, or lists, mappings or records of these, of type ``kind``.
    ``verb`` names the caller in messages; it is the same on all ranks.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: gather_records([bf.rank()], list[int], "example"))[0]
        [[0], [1]]
    """

    def read(peer: int, part: torch.Tensor) -> T:
        return unpack(to_bytes(part), kind, f"{verb}: what rank {peer} says")

    packed = pack(mine)
    data = from_bytes(packed, torch.uint8, (len(packed),))

    def plan() -> OperationSpec[list[T]]:
        return _gathering(members_of(verb, None), verb, None, data, read)

    return run_planned(plan)


def _gathering(
    members: ProcessGroup,
    verb: str,
    name: str | None,
    data: torch.Tensor,
    read: Callable[[int, torch.Tensor], T],
) -> OperationSpec[list[T]]:
    """Build the operation that gathers the sizes of all ranks' bytes, then the bytes."""
    ranks, transport = members.ranks, members.transport
    form = ExchangeSignature(verb + (f" {name!r}" if name else ""), "uint8", (None,))

    def messages(op: OperationExchanges, own: torch.Tensor) -> Steps[list[T]]:
        return combine((yield from exchange_all_gather(op, ranks, form, own)))

    def start(sizes: Sequence[torch.Tensor], *_: object) -> StartedCollective[list[T]]:
        lengths = torch.cat(list(sizes)).tolist()
        started = start_gathering(transport, data, lengths)
        return started.then(lambda whole: combine(torch.split(whole, lengths)))

    def combine(parts: Sequence[torch.Tensor], *_: object) -> list[T]:
        return [read(peer, part) for peer, part in zip(ranks, parts, strict=True)]

    ways = CollectiveImplementations(combine, start, make_tensor([data.numel()], torch.int64))
    return members.collective(verb, form, (data, None), messages, ways, name)


broadcast_object_nonblocking = nonblocking(broadcast_object)
allgather_object_nonblocking = nonblocking(allgather_object)


def _pickled(obj: Any) -> torch.Tensor:
    data = pickle.dumps(obj, protocol=5)
    return from_bytes(data, torch.uint8, (len(data),))


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(to_bytes(data))
