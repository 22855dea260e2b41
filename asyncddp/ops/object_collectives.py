"""``broadcast_object`` and ``allgather_object``: collectives of pickled Python objects.

Pickle runs what it reads, so only users' objects use it; the library uses :func:`gather_records`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from asyncddp.context import current
from asyncddp.engine import (
    ExchangeSignature,
    OperationExchanges,
    OperationSpec,
    SlotCall,
    SlotExchange,
    Steps,
)
from asyncddp.ops.slot_fast_path import run_in_slots
from asyncddp.ops.validation import check_rank
from asyncddp.ops.variants import blocking, nonblocking
from asyncddp.serialization import pack, unpack
from asyncddp.tensors.allocation import empty, make_tensor
from asyncddp.tensors.byte_views import as_bytes, from_bytes

T = TypeVar("T")


@blocking
def broadcast_object(
    obj: Any = None, root_rank: int = 0, *, name: str | None = None
) -> OperationSpec[Any]:
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
    title = f"broadcast_object(root_rank={root})" + (f" {name!r}" if name else "")
    form = ExchangeSignature(title, "uint8", ())
    here = context.rank == root
    data = _pickled(obj) if here else empty((0,), torch.uint8)

    def steps(op: OperationExchanges) -> Steps[Any]:
        everyone, transport = range(context.size), context.transport
        length = make_tensor([data.numel()], torch.int64)
        yield from op.collective(everyone, form, lambda: transport.ibroadcast(length, root))
        value = data if here else empty((int(length),), torch.uint8)
        yield from op.collective(everyone, form, lambda: transport.ibroadcast(value, root))
        return obj if here else _unpickled(value)

    def combine(parts: Sequence[torch.Tensor], *_: object) -> Any:
        return obj if here else _unpickled(parts[root])

    exchange = SlotExchange(form, combine if _slots_take(data) else None, gives=here)
    call = SlotCall(exchange, data)
    return OperationSpec("broadcast_object", steps, name, ordered=True, slot_call=call)


@blocking
def allgather_object(obj: Any, *, name: str | None = None) -> OperationSpec[list[Any]]:
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
    return _gathering("allgather_object", name, _pickled(obj), lambda _, part: _unpickled(part))


def gather_records(mine: T, kind: type[T], verb: str) -> list[T]:
    """Gather plain records of all ranks on all ranks, without pickle; collective.

    A record is a number, string, None, or lists, mappings or records of them, of the given kind.
    ``verb`` says in messages on whose behalf; it is the same on all ranks.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: gather_records([bf.rank()], list[int], "example"))[0]
        [[0], [1]]
    """

    def read(peer: int, part: torch.Tensor) -> T:
        return unpack(as_bytes(part).numpy().tobytes(), kind, f"{verb}: what rank {peer} says")

    packed = pack(mine)
    data = from_bytes(packed, torch.uint8, (len(packed),))
    return run_in_slots(current().engine, _gathering(verb, None, data, read))


def _gathering(
    verb: str, name: str | None, data: torch.Tensor, read: Callable[[int, torch.Tensor], T]
) -> OperationSpec[list[T]]:
    """Build the operation that gathers the sizes of all ranks' bytes, then the bytes."""
    context, title = current(), verb + (f" {name!r}" if name else "")

    def steps(op: OperationExchanges) -> Steps[list[T]]:
        everyone, transport = range(context.size), context.transport
        lengths = empty((context.size,), torch.int64)
        mine, ones = make_tensor([data.numel()], torch.int64), [1] * context.size
        yield from op.collective(everyone, form, lambda: transport.iallgather(mine, lengths, ones))
        counts = lengths.tolist()
        whole = empty((sum(counts),), torch.uint8)
        yield from op.collective(everyone, form, lambda: transport.iallgather(data, whole, counts))
        return [read(peer, part) for peer, part in enumerate(torch.split(whole, counts))]

    def combine(parts: Sequence[torch.Tensor], *_: object) -> list[T]:
        return [read(peer, part) for peer, part in enumerate(parts)]

    form = ExchangeSignature(title, "uint8", (None,))
    call = SlotCall(SlotExchange(form, combine if _slots_take(data) else None), data)
    return OperationSpec(verb, steps, name, ordered=True, slot_call=call)


def _slots_take(data: torch.Tensor) -> bool:
    slots = current().transport.collective_slots
    return slots is not None and data.nbytes <= slots.capacity


broadcast_object_nonblocking = nonblocking(broadcast_object)
allgather_object_nonblocking = nonblocking(allgather_object)


def _pickled(obj: Any) -> torch.Tensor:
    data = pickle.dumps(obj, protocol=5)
    return from_bytes(data, torch.uint8, (len(data),))


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(as_bytes(data).numpy().tobytes())
