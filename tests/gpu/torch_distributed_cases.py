"""What holds of the torch.distributed backend with tensors on a GPU: values, and their order."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

import asyncddp as bf
from asyncddp.device.stream_registry import streams_of
from asyncddp.integrations.torch_distributed.process_group import AsyncDDPProcessGroup
from asyncddp.integrations.torch_distributed.world import TorchWorld
from asyncddp.transport.cuda.staged_transport import device_transport_for
from tests.support.oracle import held

__all__ = ["agrees_with_the_host", "each_verb_once", "from_any_rank", "group", "races", "served_by"]

SHAPES = [(0,), (1,), (3, 4), (70_001,), (1_500_000,)]


@contextmanager
def group():
    """A process group of all ranks, made as ``init_process_group`` makes it."""
    context = bf.current()
    ranks = TorchWorld(context.transport, context.config).default_group(bf.rank(), bf.size())
    made = AsyncDDPProcessGroup(ranks, dist.HashStore(), 20.0, "the group")
    try:
        yield made
        made.barrier().wait()
    finally:
        made.shutdown()


def _reduced(op, made, x):
    out = x.clone()
    made.allreduce([out], op).wait()
    return out


def _coalesced(made, x):
    outs = [x.clone(), (2 * x).double()]
    made.allreduce_coalesced(outs).wait()
    return torch.cat([outs[0].double(), outs[1]])


def _strided(made, x):
    out = torch.stack([x, x], -1)[..., 0]
    made.allreduce([out]).wait()
    return out.contiguous()


def _reduce(made, x):
    out = x.clone()
    made.reduce([out], _last(), dist.ReduceOp.SUM).wait()
    return out if bf.rank() == _last() else x.clone()


def _broadcast(made, x):
    out = x.clone()
    made.broadcast([out], _rooted(dist.BroadcastOptions())).wait()
    return out


def _allgather(made, x):
    outs = [torch.empty_like(x) for _ in range(bf.size())]
    made.allgather([outs], [x]).wait()
    return torch.stack(outs)


def _allgather_base(made, x):
    out = torch.empty_like(torch.cat([x] * bf.size()))
    made._allgather_base(out, x).wait()
    return out


def _gather(made, x):
    outs, is_root = [torch.empty_like(x) for _ in range(bf.size())], bf.rank() == _last()
    made.gather([outs] if is_root else [], [x], _rooted(dist.GatherOptions())).wait()
    return torch.stack(outs) if is_root else x.clone()


def _scatter(made, x):
    out, parts = torch.empty_like(x), [_parts(x)] if bf.rank() == _last() else []
    made.scatter([out], parts, _rooted(dist.ScatterOptions())).wait()
    return out


def _reduce_scatter(made, x):
    out = torch.empty_like(x)
    made.reduce_scatter([out], [_parts(x)]).wait()
    return out


def _reduce_scatter_base(made, x):
    out = torch.empty_like(x)
    made._reduce_scatter_base(out, torch.cat(_parts(x))).wait()
    return out


def _alltoall(made, x):
    outs = [torch.empty_like(x) for _ in range(bf.size())]
    made.alltoall(outs, _parts(x)).wait()
    return torch.stack(outs)


def _alltoall_base(made, x):
    whole = torch.cat(_parts(x))
    out = torch.empty_like(whole)
    made.alltoall_base(out, whole).wait()
    return out


def _messages(made, x):
    out = torch.empty_like(x)
    received = made.recv([out], (bf.rank() - 1) % bf.size(), 3)
    made.send([x], (bf.rank() + 1) % bf.size(), 3).wait()
    received.wait()
    return out


def _last():
    return bf.size() - 1


def _parts(x):
    return [x + r for r in range(bf.size())]


def _rooted(options):
    options.rootRank = _last()
    return options


_VERBS = {
    "allreduce": partial(_reduced, dist.ReduceOp.SUM),
    "average": partial(_reduced, dist.ReduceOp.AVG),
    "largest": partial(_reduced, dist.ReduceOp.MAX),
    "allreduce_coalesced": _coalesced,
    "strided": _strided,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "_allgather_base": _allgather_base,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_base,
    "alltoall": _alltoall,
    "alltoall_base": _alltoall_base,
    "messages": _messages,
}
"""Each verb that takes a tensor, as a function of a group and a tensor that returns one."""


def verbs(made):
    return {name: partial(verb, made) for name, verb in _VERBS.items()}


def agrees_with_the_host(place, dtype):
    """Every verb and shape gives on the device what it gives on the host, within rounding."""
    with group() as made:
        for name, verb in verbs(made).items():
            for seed, shape in enumerate(SHAPES):
                x = held(bf.rank(), shape, dtype, seed)
                expected = verb(x)
                with place.there():
                    got = verb(x.to(place.device))
                    assert got.device == place.device, name
                    torch.testing.assert_close(got.cpu(), expected, msg=f"{name} of {shape}")


def races(place, steps, side):
    """Slow work before a verb makes its input, and slow work after it uses its result."""

    def in_place(x):
        made.allreduce([x]).wait()
        return x + 0.0

    with group() as made:
        for step in range(steps):
            for name, verb in {"in place": in_place, **verbs(made)}.items():
                x = held(bf.rank(), (100_000,), torch.float32, step)
                expected = verb(x.clone())
                with place.there(), place.side() if side else nullcontext():
                    late = torch.full(x.shape, float("nan"))
                    place.late(late, x)
                    got = verb(late)
                    late.fill_(float("nan"))
                    del late
                    spoilt = torch.full((100_000,), float("nan"))
                    place.busy()
                    torch.testing.assert_close((got + 0.0).cpu(), expected, msg=f"{name}, {step}")
                    del spoilt


def each_verb_once(place, watch):
    """Warmed up, then every verb once under ``watch``, a context that is told its name."""
    with group() as made, place.there():
        x = held(bf.rank(), (300_000,), torch.float32)
        for name, verb in verbs(made).items():
            verb(x)
            place.ends()
            made.barrier().wait()
            with watch(name):
                result = verb(x)
                made.barrier().wait()
            place.ends()
            del result


def from_any_rank(place):
    """Rank 0 receives one large tensor from each other rank, whichever comes first."""
    found = {}
    with group() as made, place.there():
        if bf.rank():
            made.send([torch.full((2_000_000,), float(bf.rank()))], 0, 5).wait()
            return found
        outs = [torch.zeros(2_000_000) for _ in range(bf.size() - 1)]
        works = [made.recv_anysource([out], 5) for out in outs]
        for work, out in zip(works, outs, strict=True):
            work.wait()
            found[work._source_rank()] = out.cpu()
    return found


def served_by(place):
    """The name of the transport by which the group's sums of tensors on the device go."""
    with group() as made, place.there():
        x = torch.ones(100_000)
        made.allreduce([x]).wait()
        assert torch.equal(x.cpu(), torch.full((100_000,), float(bf.size()), device="cpu"))
        return device_transport_for(made.group.transport, streams_of(x)).name
