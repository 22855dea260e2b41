r"""Windows: tensors that neighbours publish and read without waiting for each other.

Every rank of a window holds its own tensor x and, for each in-neighbour j, a *buffer* :math:`b_j`:
what j has put there. ``win_put`` and ``win_accumulate`` write into the neighbours' buffers,
``win_get`` reads a neighbour's tensor into one's own buffer, ``win_update`` mixes the buffers into
one's own tensor. Only ``win_create`` and ``win_free`` are collective. Buffers lie in the memory of
the host, wherever the tensors do.

A put completes while its target computes, or sleeps. A reader sees each neighbour's tensor whole,
of one version; a writer never waits for a reader. What is accumulated and collected counts exactly
once, so that sums over ranks are conserved.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from asyncddp.context import current
from asyncddp.errors import ArgumentError, DtypeError, MismatchError
from asyncddp.memory.dtypes import Kind
from asyncddp.memory.modes import uncompiled
from asyncddp.memory.shared import Place
from asyncddp.ops.barrier import barrier
from asyncddp.ops.door import check_tensor
from asyncddp.ops.objects import gather_records
from asyncddp.ops.window_handles import win_cancel, win_flush, win_poll, win_wait
from asyncddp.ops.window_mutex import win_mutex
from asyncddp.ops.window_reading import (
    win_get,
    win_get_nonblocking,
    win_read_neighbor,
    win_update,
    win_update_then_collect,
)
from asyncddp.ops.window_writing import (
    win_accumulate,
    win_accumulate_nonblocking,
    win_put,
    win_put_nonblocking,
)
from asyncddp.windows import Staleness, windows_of
from topology import Schedule

__all__ = [
    "create_along",
    "get_current_created_window_names",
    "get_win_version",
    "turn_off_win_ops_with_associated_p",
    "turn_on_win_ops_with_associated_p",
    "win_accumulate",
    "win_accumulate_nonblocking",
    "win_associated_p",
    "win_cancel",
    "win_create",
    "win_flush",
    "win_free",
    "win_get",
    "win_get_nonblocking",
    "win_mutex",
    "win_poll",
    "win_put",
    "win_put_nonblocking",
    "win_read_neighbor",
    "win_staleness",
    "win_update",
    "win_update_then_collect",
    "win_wait",
]

_ROUNDS = 4096


class _Facts(NamedTuple):
    """What must be equal on all ranks of a window to be made."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    zero_init: bool


class _Offer(NamedTuple):
    """What one rank says about a window to be made.

    Attributes:
        facts: What must be equal on all ranks.
        sources, targets: Its in- and out-neighbours.
        places: Where out-neighbours on its machine find what it publishes.
    """

    facts: _Facts
    sources: list[int]
    targets: list[int]
    places: dict[int, tuple[Place, Place]]


@uncompiled
def win_create(tensor: torch.Tensor, name: str, zero_init: bool = False) -> bool:
    """Make a window along the edges of the topology; collective.

    Args:
        tensor: This rank's own tensor, equal in shape and dtype on all ranks. The window keeps it,
            and updates are written into it.
        name: The window's name, equal on all ranks.
        zero_init: Whether the buffers begin at zero; as this rank's own tensor otherwise.

    Returns:
        True; False if this rank has a window of that name already, and nothing was done.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: Something that is no tensor, a name that is no text, or a schedule without
            a period.
        DtypeError: The dtype is neither float nor integer.
        MismatchError: Ranks differ in name, shape, dtype, ``zero_init`` or topology; raised on
            all of them.

    Example:
        >>> import asyncddp as bf, torch
        >>> def gossip():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x")
        ...     bf.win_put(x, "x")
        ...     bf.barrier()
        ...     return bf.win_update("x").item()
        >>> with bf.local_world(2) as world:
        ...     world.run(gossip)
        [0.5, 0.5]
    """
    return create_along(current().topologies.ranks, tensor, name, zero_init=zero_init)


def create_along(
    schedule: Schedule, tensor: torch.Tensor, name: str, *, zero_init: bool = False
) -> bool:
    """Do what :func:`win_create` does, along the edges of any topology; collective.

    Args:
        schedule: The topology, whose weights the window's verbs take where they are given none.
        tensor: As for :func:`win_create`, as is what follows.
        name: The window's name.
        zero_init: Whether the buffers begin at zero.
    """
    row = check_tensor("win_create", tensor)
    if row.kind in (Kind.BOOL, Kind.COMPLEX):
        raise DtypeError(f"win_create: a window holds floats or integers, got {row.name}")
    if not isinstance(name, str):
        raise ArgumentError(f"win_create: argument name: expected a string, got {name!r}")
    context = current()
    windows = windows_of(context)
    if name in windows.names:
        return False
    sources, targets = _neighbors(schedule, context.rank)
    window = windows.prepare(name, tensor, schedule, zero_init=zero_init)
    places, own = windows.boards(targets)
    facts = _Facts(name, tuple(tensor.shape), row.name, bool(zero_init))
    every = gather_records(_Offer(facts, sources, targets, places), _Offer, "win_create")
    try:
        _insist_on_fit(every)
    except MismatchError:
        windows.give_back(own.values())
        raise
    shown = {peer: every[peer].places.get(context.rank) for peer in sources}
    windows.connect(window, targets, shown, own)
    if schedule is context.topologies.ranks:
        context.topologies.pinned.add(name)
    barrier()
    return True


def _neighbors(schedule: Schedule, rank: int) -> tuple[list[int], list[int]]:
    """In- and out-neighbours in any round of a topology."""
    period = schedule.period
    if period is None or period > _ROUNDS:
        raise ArgumentError(
            f"win_create: {schedule.name} does not repeat, so that its edges are not known; set a "
            f"graph, or a schedule with a period of at most {_ROUNDS} rounds"
        )
    rounds = [schedule.neighbors(rank, k) for k in range(period)]
    sources = {peer for near in rounds for peer in near.src_weights}
    return sorted(sources), sorted({peer for near in rounds for peer in near.dst_ranks})


def _insist_on_fit(every: list[_Offer]) -> None:
    """Insist that all ranks make the same window along the same edges; alike on all of them.

    Raises:
        MismatchError: They do not.
    """
    for peer, offer in enumerate(every):
        for key, value, theirs in zip(_Facts._fields, every[0].facts, offer.facts, strict=True):
            if theirs != value:
                raise MismatchError(
                    f"win_create: rank 0 gives {key}={value!r}, but rank {peer} {theirs!r}; "
                    "call it with equal names, shapes, dtypes and zero_init"
                )
    for rank, offer in enumerate(every):
        for peer, other in enumerate(every):
            if (peer in offer.sources) != (rank in other.targets):
                expects = "expects to receive" if peer in offer.sources else "does not receive"
                sends = "sends" if rank in other.targets else "does not send"
                raise MismatchError(
                    f"win_create: rank {rank} {expects} from rank {peer}, which {sends} to it; set "
                    "the same topology on all ranks"
                )


@uncompiled
def win_free(name: str | None = None) -> bool:
    """Free a window, or all; collective.

    What is under way into a window that is freed gets lost, and handles of it raise.

    Args:
        name: Which one; all if None.

    Returns:
        True.

    Raises:
        UnknownNameError: There is no such window.
        MismatchError: Another rank frees another one, or calls another collective.

    Example:
        >>> import asyncddp as bf, torch
        >>> def freed():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x", zero_init=True)
        ...     bf.win_free("x")
        ...     return bf.get_current_created_window_names()
        >>> with bf.local_world(2) as world:
        ...     world.run(freed)
        [[], []]
    """
    windows = windows_of(current())
    names = windows.names if name is None else [windows.find("win_free", name).name]
    barrier(name=f"win_free {name}")
    for one in names:
        windows.drop(one)
    barrier()
    return True


@uncompiled
def get_current_created_window_names() -> list[str]:
    """The names of this rank's windows, sorted.

    Example:
        >>> import asyncddp as bf, torch
        >>> def named():
        ...     bf.win_create(torch.zeros(2), "b")
        ...     bf.win_create(torch.zeros(2), "a")
        ...     return bf.get_current_created_window_names()
        >>> with bf.local_world(2) as world:
        ...     world.run(named)
        [['a', 'b'], ['a', 'b']]
    """
    return windows_of(current()).names


# what is known of a window


@uncompiled
def get_win_version(name: str) -> dict[int, int]:
    """How many times each in-neighbour's buffer was written since this rank's last update.

    Args:
        name: The window.

    Raises:
        UnknownNameError: There is no such window.

    Example:
        >>> import asyncddp as bf, torch
        >>> def counted():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x", zero_init=True)
        ...     bf.win_put(x, "x")
        ...     bf.win_put(x, "x")
        ...     bf.barrier()
        ...     return bf.get_win_version("x")
        >>> with bf.local_world(2) as world:
        ...     world.run(counted)
        [{1: 2}, {0: 2}]
    """
    return windows_of(current()).find("get_win_version", name).versions()


@uncompiled
def win_staleness(name: str) -> dict[int, Staleness]:
    """How old what was last read of each in-neighbour is.

    Args:
        name: The window.

    Returns:
        By rank, a tuple ``(version, steps, seconds, lag)``: how many times the neighbour had
        published to this rank, how many steps it has made since, how long ago that was, and by how
        many steps it was behind this rank. A step is a put or an accumulate.

    Raises:
        UnknownNameError: There is no such window.

    Example:
        >>> import asyncddp as bf, torch
        >>> def age():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x", zero_init=True)
        ...     bf.win_put(x, "x")
        ...     bf.barrier()
        ...     bf.win_update("x")
        ...     return bf.win_staleness("x")[1 - bf.rank()].version
        >>> with bf.local_world(2) as world:
        ...     world.run(age)
        [1, 1]
    """
    return windows_of(current()).find("win_staleness", name).staleness()


@uncompiled
def win_associated_p(name: str) -> float:
    """This rank's associated scalar p, which push-sum divides by.

    Args:
        name: The window.

    Raises:
        UnknownNameError: There is no such window.

    Example:
        >>> import asyncddp as bf, torch
        >>> def halved():
        ...     bf.turn_on_win_ops_with_associated_p()
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x", zero_init=True)
        ...     bf.win_accumulate(x, "x", self_weight=0.5, dst_weights={1 - bf.rank(): 0.5})
        ...     bf.barrier()
        ...     bf.win_update_then_collect("x")
        ...     return bf.win_associated_p("x")
        >>> with bf.local_world(2) as world:
        ...     world.run(halved)
        [1.0, 1.0]
    """
    return windows_of(current()).find("win_associated_p", name).p


@uncompiled
def turn_on_win_ops_with_associated_p() -> None:
    """From now on puts, accumulates and updates map :func:`win_associated_p` as the tensor."""
    windows_of(current()).with_p = True


@uncompiled
def turn_off_win_ops_with_associated_p() -> None:
    """From now on they leave :func:`win_associated_p` alone."""
    windows_of(current()).with_p = False
