"""Functions that create and free windows (tensors that neighbours access one-sided); collective."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch

from asyncddp.compression import Compressor, compressor_for
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.context import current
from asyncddp.engine import require_name
from asyncddp.errors import ArgumentError, DtypeError, MismatchError
from asyncddp.ops.barrier import barrier
from asyncddp.ops.encoded_exchange import Compression, checked_compression
from asyncddp.ops.object_collectives import gather_records
from asyncddp.ops.validation import check_tensor
from asyncddp.shm.arena import SharedMemoryHandle, handle_of_block
from asyncddp.tensors.dtypes import DtypeKind
from asyncddp.topology import Schedule
from asyncddp.torch_modes import uncompiled
from asyncddp.windows import windows_of

_ROUNDS = 4096


class _WindowSpec(NamedTuple):
    """Properties of a new window that must be equal on all ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    zero_init: bool
    associated_p: bool
    compression: str


class _WindowProposal(NamedTuple):
    """One rank's tensor properties and neighbours for a new window, compared on all ranks."""

    facts: _WindowSpec
    sources: list[int]
    targets: list[int]
    places: dict[int, SharedMemoryHandle]
    """Shared memory in which out-neighbours on its machine find what it publishes."""


@uncompiled
def win_create(
    tensor: torch.Tensor,
    name: str,
    zero_init: bool = False,
    *,
    associated_p: bool = False,
    compression: Compression = None,
) -> bool:
    """Create a window along the edges of the topology; collective.

    Args:
        tensor: This rank's tensor, equal in shape and dtype on all ranks; the window keeps and
            updates it.
        name: The window's name, equal on all ranks.
        zero_init: Whether the buffers start at zero; otherwise as copies of this rank's own tensor.
        associated_p: Whether operations also apply to :func:`win_associated_p`, as push-sum needs.
        compression: Compressor, or its name, that encodes what is put and published for gets; this
            rank's own tensor counts as it is in updates. Not for ``win_accumulate``, nor for
            tensors on a GPU.

    Returns:
        True; False if this rank has a window of that name already, and nothing was done.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: No tensor, a name that is no string, a schedule without a period, or a
            compressor for a tensor on a GPU.
        DtypeError: The dtype is neither float nor integer, or cannot be compressed.
        MismatchError: Ranks differ in arguments, shape, dtype or topology; raised on all of them.

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
    schedule = current().topologies.ranks
    return create_along(
        schedule,
        tensor,
        name,
        zero_init=zero_init,
        associated_p=associated_p,
        compression=compression,
    )


def create_along(
    schedule: Schedule,
    tensor: torch.Tensor,
    name: str,
    *,
    zero_init: bool = False,
    associated_p: bool = False,
    compression: Compression = None,
) -> bool:
    """Create a window as :func:`win_create` does, along the edges of any topology; collective.

    By default the window's verbs use the weights of this topology.
    """
    traits = check_tensor("win_create", tensor)
    if traits.kind in (DtypeKind.BOOL, DtypeKind.COMPLEX):
        raise DtypeError(f"win_create: a window holds floats or integers, got {traits.name}")
    if not isinstance(name, str):
        raise ArgumentError(f"win_create: argument name: expected a string, got {name!r}")
    require_name("win_create", name)
    context = current()
    windows = windows_of(context)
    if name in windows.names:
        return False
    sources, targets = _neighbors(schedule, context.rank)
    codec = _codec_for(tensor, compression, context.rank, name)
    window = windows.prepare(name, tensor, schedule, zero_init=zero_init, codec=codec)
    own = windows.reserve(targets)
    places = {peer: handle_of_block(block) for peer, block in own.items()}
    window.with_p = bool(associated_p)
    encoder = "none" if codec is None else repr(codec.compressor)
    facts = _WindowSpec(
        name, tuple(tensor.shape), traits.name, bool(zero_init), bool(associated_p), encoder
    )
    proposal = _WindowProposal(facts, sources, targets, places)
    records = gather_records(proposal, _WindowProposal, "win_create")
    gathered = dict(zip(context.members, records, strict=True))
    try:
        _require_matching_proposals(gathered)
    except MismatchError:
        windows.release(own)
        raise
    edge_places = {peer: gathered[peer].places.get(context.rank) for peer in sources}
    windows.connect(window, targets, edge_places, own)
    if schedule is context.topologies.ranks:
        context.topologies.pinned.add(name)
    barrier()
    return True


def _codec_for(
    tensor: torch.Tensor, compression: Compression, rank: int, name: str
) -> TensorCompressor | None:
    """Return the compressor of a window's tensors with its state; None for no compression."""
    if isinstance(compression, str):
        compression = compressor_for("win_create", compression)
    if isinstance(compression, Compressor):  # a window remembers what its compressor has to
        compression = TensorCompressor(compression, zlib.crc32(f"{rank} {name}".encode()))
    checked_compression("win_create", tensor, compression)
    if compression is not None and not tensor.is_cpu:
        raise ArgumentError(
            "win_create: argument compression: expected None for a tensor on "
            f"{tensor.device}, got {compression.compressor!r}; keep the window's tensor on the host"
        )
    return compression if tensor.numel() else None


def _neighbors(schedule: Schedule, rank: int) -> tuple[list[int], list[int]]:
    """Return the in- and out-neighbours over all rounds of a topology."""
    period = schedule.period
    if period is None or period > _ROUNDS:
        raise ArgumentError(
            f"win_create: {schedule.name} does not repeat, so that its edges are not known; set a "
            f"graph, or a schedule with a period of at most {_ROUNDS} rounds"
        )
    rounds = [schedule.neighbors(rank, k) for k in range(period)]
    sources = {peer for neighbors in rounds for peer in neighbors.src_weights}
    return sorted(sources), sorted({peer for neighbors in rounds for peer in neighbors.dst_ranks})


def _require_matching_proposals(gathered: Mapping[int, _WindowProposal]) -> None:
    """Raise MismatchError on all ranks unless they propose the same window and edges."""
    lowest = min(gathered)
    for peer, offer in gathered.items():
        compared = zip(_WindowSpec._fields, gathered[lowest].facts, offer.facts, strict=True)
        for key, value, theirs in compared:
            if theirs != value:
                raise MismatchError(
                    f"win_create: rank {lowest} gives {key}={value!r}, but rank {peer} {theirs!r}; "
                    "call it with equal names, shapes, dtypes, zero_init and associated_p"
                )
    for rank, offer in gathered.items():
        for peer, other in gathered.items():
            if (peer in offer.sources) != (rank in other.targets):
                expects = "expects to receive" if peer in offer.sources else "does not receive"
                sends = "sends" if rank in other.targets else "does not send"
                raise MismatchError(
                    f"win_create: rank {rank} {expects} from rank {peer}, which {sends} to it; set "
                    "the same topology on all ranks"
                )


@uncompiled
def win_free(name: str | None = None) -> bool:
    """Free the window of that name, or all windows if None, and return True; collective.

    Operations in flight into a freed window are lost, and their handles raise an error.

    Raises:
        UnknownNameError: There is no such window.
        MismatchError: Another rank frees another window, or calls another collective.

    Example:
        >>> import asyncddp as bf, torch
        >>> def freed():
        ...     for name in ("c", "b", "a"):
        ...         bf.win_create(torch.zeros(2), name)
        ...     bf.win_free("c")
        ...     return bf.get_current_created_window_names()
        >>> with bf.local_world(2) as world:
        ...     world.run(freed)
        [['a', 'b'], ['a', 'b']]
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
    """Return the names of this rank's windows, sorted; see :func:`win_free`."""
    return windows_of(current()).names
