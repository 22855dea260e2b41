"""Operations of a torch.distributed process group, specified for asyncddp's progress engine.

Each function returns a specification whose result is written into tensors of the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from asyncddp.device.stream_registry import stream_ordering_of
from asyncddp.engine import (
    OperationExchanges,
    OperationSpec,
    ProgressEngine,
    ShortMessage,
    Steps,
)
from asyncddp.engine.messages import MatchKey
from asyncddp.errors import ArgumentError
from asyncddp.integrations.torch_distributed.reductions import TorchReduction, reduction_for
from asyncddp.ops.allgather import plan_allgather
from asyncddp.ops.allreduce import plan_allreduce
from asyncddp.ops.alltoall import plan_alltoall, require_rows
from asyncddp.ops.broadcast import plan_broadcast
from asyncddp.ops.group_exchange import (
    exchange_all_to_all,
    exchange_from_root,
    exchange_tensors,
    exchange_to_root,
)
from asyncddp.ops.process_group import CollectiveImplementations, ProcessGroup
from asyncddp.ops.reduce import plan_reduce
from asyncddp.ops.reduce_scatter import plan_reduce_scatter
from asyncddp.ops.validation import signature_of
from asyncddp.tensors.byte_views import dense
from asyncddp.tensors.dtypes import DTYPES

Tensors = Sequence[torch.Tensor]
Operation: TypeAlias = OperationSpec[Any]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Flatten a tensor, without a copy if possible; view dtypes that cannot be sent as bytes.

    Tensors of dtypes without arithmetic are sent as bytes.
    """
    flat = dense(tensor).view(-1)
    return flat if flat.dtype in DTYPES else flat.view(torch.uint8)


def _count(tensor: torch.Tensor) -> int:
    """Return the number of elements that :func:`_flat` makes of a tensor."""
    return tensor.numel() if tensor.dtype in DTYPES else tensor.nbytes


def _store(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write values in the form of :func:`_flat` into a tensor, unless they share its memory."""
    if value.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(value.view(tensor.dtype).view(tensor.shape))


def _joined(tensors: Tensors) -> torch.Tensor:
    return _flat(tensors[0]) if len(tensors) == 1 else torch.cat([_flat(one) for one in tensors])


def _split(flat: torch.Tensor, tensors: Tensors) -> None:
    """Split a flat tensor into several tensors, in their order."""
    sizes = [_count(one) for one in tensors]
    for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
        _store(tensor, part)


def allreduce(group: ProcessGroup, verb: str, tensors: Tensors, op: object) -> list[Operation]:
    """Reduce tensors in place; tensors of one dtype are sent together."""
    specs: list[Operation] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        reduction = reduction_for(verb, op, same[0])
        given = reduction.prepare(same[0].detach() if len(same) == 1 else _joined(same))

        def write(
            total: torch.Tensor, same: Tensors = same, reduction: TorchReduction = reduction
        ) -> None:
            _split(reduction.finish(total, group.size).to(same[0].dtype).view(-1), same)

        spec = plan_allreduce(verb, group, given, reduction.reduction, out=given)
        specs.append(spec if given.data_ptr() == same[0].data_ptr() else spec.then(write))
    return specs


def reduce(
    group: ProcessGroup, verb: str, tensors: Tensors, op: object, root: int
) -> list[Operation]:
    """Reduce tensors into the root's tensors; other ranks' tensors are unchanged."""
    specs: list[Operation] = []
    for tensor in tensors:
        reduction = reduction_for(verb, op, tensor)
        given = reduction.prepare(tensor.detach())

        def write(
            total: torch.Tensor | None,
            tensor: torch.Tensor = tensor,
            reduction: TorchReduction = reduction,
        ) -> None:
            if total is not None:
                tensor.detach().copy_(reduction.finish(total, group.size))

        specs.append(plan_reduce(group, given, root, reduction.reduction).then(write))
    return specs


def broadcast(group: ProcessGroup, tensors: Tensors, root: int) -> list[Operation]:
    """Overwrite tensors with the root's."""
    specs: list[Operation] = []
    for tensor in tensors:
        flat = _flat(tensor)
        spec = plan_broadcast(group, flat, root, out=flat)
        specs.append(spec.then(partial(_store, tensor)))
    return specs


def allgather(group: ProcessGroup, outs: Tensors, own: torch.Tensor) -> Operation:
    """Gather the tensors of all ranks into a list of tensors."""
    given, rows = _flat(own), [_count(out) for out in outs]
    if rows[group.ranks.index(group.context.rank)] != given.numel():
        raise ArgumentError(
            f"allgather: expected a place for {own.numel()} elements of this rank, got a list of "
            f"tensors of {[out.numel() for out in outs]} elements"
        )
    return plan_allgather(group, given, rows=rows).then(lambda whole: _split(whole, outs))


def allgather_whole(group: ProcessGroup, out: torch.Tensor, own: torch.Tensor) -> Operation:
    """Gather the tensors of all ranks into one tensor."""
    given, whole = _flat(own), _flat(out)
    if given.numel() and given.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
        given = given.clone()  # a part of the result
    rows = [given.numel()] * group.size
    spec = plan_allgather(group, given, rows=rows, out=whole)
    return spec.then(partial(_store, out))


def gather(group: ProcessGroup, outs: Tensors, own: torch.Tensor, root: int) -> Operation:
    """Gather the tensors of all ranks on the root."""
    given, into = _flat(own), [_flat(out) for out in outs]
    form = signature_of(f"gather(root={root})", given)

    def write(parts: Tensors) -> None:
        for out, part in zip(outs, parts, strict=True):
            _store(out, part)

    def steps(op: OperationExchanges) -> Steps[Any]:
        write((yield from exchange_to_root(op, group.ranks, root, form, given, into)) or ())

    def combine(parts: Tensors, *_: object) -> None:
        write(parts if group.context.rank == root else ())

    call = group.slot_call(form, given, None, CollectiveImplementations(combine))
    return group.operation("gather", steps, None, given, *into, slot_call=call)


def scatter(group: ProcessGroup, out: torch.Tensor, parts: Tensors, root: int) -> Operation:
    """Send part r of the root's tensors to rank r."""
    into, given = _flat(out), [_flat(part) for part in parts] or None
    form = signature_of(f"scatter(root={root})", into)

    def steps(op: OperationExchanges) -> Steps[Any]:
        got = yield from exchange_from_root(op, group.ranks, root, form, given, into, into)
        _store(out, got)

    return group.operation("scatter", steps, None, into, *(given or ()))


def reduce_scatter(group: ProcessGroup, out: torch.Tensor, parts: Tensors, op: object) -> Operation:
    """Reduce part r of all ranks' lists into the tensor of rank r."""
    if len({part.numel() for part in parts}) == 1:
        return reduce_scatter_whole(group, "reduce_scatter", out, _joined(parts), op)
    reduction = reduction_for("reduce_scatter", op, out)
    given = [reduction.prepare(_flat(part)) for part in parts]
    form = signature_of(f"reduce_scatter({reduction.reduction.name})", given[0], ragged=True)

    def steps(op: OperationExchanges) -> Steps[Any]:
        terms = yield from exchange_all_to_all(op, group.ranks, form, given)
        total = reduction.finish(reduction.reduction.of(terms), group.size)
        return out.detach().copy_(total.view(out.shape))

    return group.operation("reduce_scatter", steps, None, out, *given)


def reduce_scatter_whole(
    group: ProcessGroup, verb: str, out: torch.Tensor, whole: torch.Tensor, op: object
) -> Operation:
    """Reduce one tensor in parts of equal length, each into the tensor of its rank."""
    reduction = reduction_for(verb, op, out)
    given = reduction.prepare(_flat(whole))
    flat, shape = out.detach(), (given.numel() // group.size,)
    into = None
    if flat.is_contiguous() and flat.dtype == given.dtype:
        into = flat.view(-1)
        if into.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
            given = given.clone()  # the result is a part of what is reduced

    def write(total: torch.Tensor) -> None:
        if total is not into or reduction.floors:
            flat.copy_(reduction.finish(total, group.size).view(flat.shape))

    return plan_reduce_scatter(group, given, shape, reduction.reduction, out=into).then(write)


def alltoall(group: ProcessGroup, outs: Tensors, parts: Tensors) -> Operation:
    """Send part r of a list to rank r, and receive into the tensors of another list."""
    given, into = [_flat(part) for part in parts], [_flat(out) for out in outs]
    form = signature_of("alltoall", given[0], ragged=True)

    def steps(op: OperationExchanges) -> Steps[Any]:
        got = yield from exchange_all_to_all(op, group.ranks, form, given, into)
        sizes = [out.numel() for out in into], [part.numel() for part in got]
        require_rows(op.rank, "alltoall", group.ranks, *sizes)
        for out, part in zip(outs, got, strict=True):
            _store(out, part)

    return group.operation("alltoall", steps, None, given[0], *given[1:], *into)


def alltoall_whole(
    group: ProcessGroup,
    out: torch.Tensor,
    whole: torch.Tensor,
    out_rows: Sequence[int],
    rows: Sequence[int],
) -> Operation:
    """Send rows of one tensor to each rank, receive rows into another; by default equal parts."""
    into, given = _flat(out), _flat(whole)
    sent, awaited = _counts(given, rows, group.size), _counts(into, out_rows, group.size)
    if sent == awaited and not rows and not out_rows:
        awaited = sent
    spec = plan_alltoall(group, given, sent, awaited, out=into)
    return spec.then(partial(_store, out))


def _counts(flat: torch.Tensor, rows: Sequence[int], size: int) -> list[int]:
    """Convert rows for each rank to elements; by default equal parts."""
    if not rows:
        return [flat.numel() // size] * size
    width = flat.numel() // max(1, sum(rows))
    return [width * number for number in rows]


def send(group: ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Operation:
    """Send a tensor to a rank."""
    flat, context = _flat(tensor), group.context

    def steps(op: OperationExchanges) -> Steps[Any]:
        return (yield from exchange_tensors(op, form, [], {peer: flat}, flat))

    name, form = _message_name(group, tag, context.rank, peer), signature_of("send", flat)
    order, message = stream_ordering_of(flat), ShortMessage.of(form, peer, flat)
    return OperationSpec("send", steps, name, stream_ordering=order, message=message)


def receive(group: ProcessGroup, tensor: torch.Tensor, peers: Sequence[int], tag: int) -> Operation:
    """Receive a tensor from whichever of the given ranks sends first; the result is its rank."""
    flat, context = _flat(tensor), group.context
    names = {peer: _message_name(group, tag, peer, context.rank) for peer in peers}

    def steps(op: OperationExchanges) -> Steps[Any]:
        source = peers[0]
        if len(peers) > 1:
            arrival = AnySourceCondition(context.engine, names)
            yield arrival
            source = arrival.source
            op.key = context.engine.claim_use(names[source])
        got = yield from exchange_tensors(op, form, [source], {}, flat, {source: flat})
        _store(tensor, got[source])
        return source

    order, form, message = stream_ordering_of(flat), signature_of("send", flat), None
    name = f"tag {tag} of {group.title} from any rank"
    if len(peers) == 1:
        name = names[peers[0]]
        if flat.data_ptr() == tensor.data_ptr():
            message = ShortMessage.of(form, peers[0], flat, receives=True)
    return OperationSpec("recv", steps, name, stream_ordering=order, message=message)


def _message_name(group: ProcessGroup, tag: int, source: int, target: int) -> str:
    return f"tag {tag} of {group.title}, from rank {source} to {target}"


class AnySourceCondition:
    """Wait condition: one of several ranks has announced a tensor that no call expects yet.

    Attributes:
        source: That rank, once done.
    """

    def __init__(self, engine: ProgressEngine, names: Mapping[int, str]) -> None:
        self._engine, self._names, self.source = engine, names, -1

    def done(self) -> bool:
        """Return True once a tensor is announced, and store its rank in ``source``."""
        for peer, name in self._names.items():
            key = MatchKey(name, self._engine.use_count(name))
            if self._engine.matcher.is_announced(peer, key):
                self.source = peer
                return True
        return False

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return no ranks: no single rank delays this one."""
        return []
