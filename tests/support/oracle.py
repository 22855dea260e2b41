"""The one oracle: rank r holds ``X[r]``, and a verb must give ``(W @ X)[r]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncddp import topology
from asyncddp.tensors.dtypes import DTYPES, DtypeKind
from asyncddp.testing.oracle import assert_result as check
from asyncddp.testing.oracle import held, mixed, summed

__all__ = [
    "AVERAGING",
    "FAMILIES",
    "LAYOUTS",
    "SHAPES",
    "check",
    "family",
    "held",
    "mixed",
    "options",
    "summed",
]

AVERAGING = [row.dtype for row in DTYPES.values() if row.kind is not DtypeKind.BOOL]
"""Dtypes that can be averaged, integers with ``round_integers``."""

SHAPES: list[tuple[int, ...]] = [(), (0,), (2, 0), (1,), (5,), (3, 4), (2, 3, 5), (70_001,)]
"""Nothing, scalars, small tensors that are fused, and one that travels in bulk."""


def options(dtype: torch.dtype) -> dict[str, Any]:
    """The arguments that an average of this dtype asks for."""
    return {"round_integers": True} if DTYPES[dtype].kind is DtypeKind.INTEGER else {}


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: torch.stack([x, x], dim=-1).flatten(-2)[..., ::2],
    "rows of a larger tensor": lambda x: torch.cat([x[:1], x, x[:1]])[1:-1],
    "part of every row": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "channels last": lambda x: x[None, :, :, None].contiguous(memory_format=torch.channels_last)[
        0, :, :, 0
    ],
    "storage with an offset": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "negative view": lambda x: torch._neg_view(-x) if x.dtype.is_signed else x,
    "conjugate view": lambda x: x.conj().resolve_conj().conj(),
    "parameter": lambda x: (
        torch.nn.Parameter(x.clone()) if x.is_floating_point() or x.is_complex() else x
    ),
}
"""The same values of a matrix, lying otherwise in memory."""


def _local_size(n: int) -> int | None:
    """A machine size of at least 3 that divides n."""
    return next((size for size in range(3, n + 1) if n % size == 0), None)


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


_ARGUMENTS: dict[str, Callable[[int], dict[str, Any] | None]] = {
    "equi_static": lambda n: {"n": n, "degree": max(1, n // 2), "seed": 3},
    "random_regular": lambda n: {"n": n, "degree": 2, "seed": 1} if n > 2 else None,
    "hypercube": lambda n: {"n": n} if _power_of_two(n) else None,
    "one_peer_hypercube": lambda n: {"n": n} if _power_of_two(n) else None,
    "shift_one": lambda n: {"n": n} if n == 1 or n % 2 == 0 else None,
    "alternating_exponential_ring": lambda n: (
        {"n": n, "local_size": 2} if _power_of_two(n) and n > 1 else None
    ),
    "base_k": lambda n: {"n": n, "k": 1},
    "simple_base_k": lambda n: {"n": n, "k": 2},
    "equi_dynamic": lambda n: {"n": n, "seed": 5},
    "inner_outer_exponential": lambda n: (
        {"n": n, "local_size": _local_size(n)} if _local_size(n) else None
    ),
    "inner_outer_ring": lambda n: (
        {"n": n, "local_size": _local_size(n)} if _local_size(n) else None
    ),
    "matcha": lambda n: {"graph": topology.ring(n), "budget": 0.5, "seed": 2},
    "matching_decomposition": lambda n: {"graph": topology.ring(n)},
    "one_peer_of": lambda n: {"graph": topology.complete(n)},
}

FAMILIES = [*topology.GRAPHS, *topology.SCHEDULES]
"""Every family of graphs and schedules; a new one is picked up as ``family(n)``."""


def family(name: str, n: int) -> topology.GraphOrSchedule | None:
    """A member of a family on n ranks, or None where it has none."""
    arguments = _ARGUMENTS.get(name, lambda n: {"n": n})(n)
    make = {**topology.GRAPHS, **topology.SCHEDULES}[name]
    return None if arguments is None else make(**arguments)
