"""Process groups of Bagua's API: each is a world of its own in which models can be trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch.distributed

from asyncddp.context import Context, current, lifecycle
from asyncddp.context import is_initialized as context_is_initialized
from asyncddp.context.group_context import split_context
from asyncddp.errors import ArgumentError
from asyncddp.integrations.bagua.errors import ProcessGroupError
from asyncddp.integrations.bagua.torch_api.communicator import Communicator
from asyncddp.ops.barrier import barrier
from asyncddp.ops.settings_agreement import require_equal_on_all_ranks
from asyncddp.ops.validation import check_rank

__all__ = [
    "BaguaProcessGroup", "from_torch_group", "init_process_group", "is_initialized", "new_group",
]  # fmt: skip

_KEY = "bagua"


@dataclass(frozen=True, eq=False)
class BaguaProcessGroup:
    """Group of ranks that call collectives and train models together.

    Attributes:
        ranks: Its ranks, ascending.
        group_name: Its name, the same on all ranks.
        context: The group as a world of its own; None on ranks that are no members.
    """

    ranks: tuple[int, ...]
    group_name: str
    context: Context | None = field(repr=False)

    def get_global_communicator(self) -> Communicator:
        """Return the communicator of all ranks of the group."""
        return Communicator.of(self.ranks, f"bagua group {self.group_name}")

    def get_intra_node_communicator(self) -> Communicator:
        """Return the communicator of the group's ranks on this node."""
        place = current().machine_rank
        near = self._on_nodes()[place]
        return Communicator.of(near, f"bagua group {self.group_name} on node {place}")

    def get_inter_node_communicator(self) -> Communicator:
        """Return the communicator of the group's first rank on each node."""
        leaders = [ranks[0] for ranks in self._on_nodes() if ranks]
        return Communicator.of(leaders, f"bagua group {self.group_name} between nodes")

    def _on_nodes(self) -> list[list[int]]:
        return [[rank for rank in m if rank in self.ranks] for m in current().machines.members]

    def require_member(self, caller: str) -> Context:
        """Return the group's context; raise ArgumentError on a rank that is not a member."""
        if self.context is None:
            raise ArgumentError(
                f"{caller}: argument process_group: expected a group with rank {current().rank}, "
                f"got that of ranks {list(self.ranks)}; call it on members only"
            )
        return self.context


@dataclass
class _State:
    """State of Bagua's API on one rank, kept in its context."""

    default_group: BaguaProcessGroup
    groups: int = 1


def init_process_group(
    store: None = None, rank: int = -1, world_size: int = -1, local_world_size: int = -1
) -> None:
    """Join the world of ranks that a launcher has started; see :func:`asyncddp.init`.

    Args:
        store: None; ranks find each other through MPI.
        rank: This rank, if it is to be checked.
        world_size: The number of ranks, if it is to be checked.
        local_world_size: The number of ranks on each node, by which nodes can be simulated.

    Raises:
        ProcessGroupError: It was called before.
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
    if not context_is_initialized():
        lifecycle.init(ranks_per_machine=None if local_world_size < 1 else local_world_size)
    context = current()
    found = {"rank": (rank, context.rank), "world_size": (world_size, context.size)}
    found["local_world_size"] = local_world_size, context.local_size
    for name, (given, actual) in found.items():
        if given not in (-1, actual):
            raise ArgumentError(
                f"init_process_group: argument {name}: expected {actual} or -1, as the launcher "
                f"has started the ranks, got {given}"
            )
    if is_initialized():
        raise ProcessGroupError(
            "init_process_group: it was called before; call it once on each rank"
        )
    group = BaguaProcessGroup(tuple(range(context.size)), "0", context)
    context.extensions[_KEY] = _State(group)


def is_initialized() -> bool:
    """Return True if ``init_process_group`` was called."""
    return context_is_initialized() and _KEY in current().extensions


def default_group() -> BaguaProcessGroup:
    """Return the group of all ranks.

    Raises:
        ProcessGroupError: ``init_process_group`` was not called.
    """
    return _state().default_group


def group_or_default(group: BaguaProcessGroup | None) -> BaguaProcessGroup:
    """Return the given group, or the group of all ranks for None."""
    return default_group() if group is None else group


def new_group(ranks: Iterable[int] | None = None, stream: Any = None) -> BaguaProcessGroup:
    """Create a group of ranks; collective over all ranks.

    Args:
        ranks: The ranks, in any order, the same on all ranks; all by default.
        stream: Has no effect: the caller's stream is used, as in torch.

    Raises:
        ProcessGroupError: ``init_process_group`` was not called.
        ArgumentError: No rank, a rank given twice, or one that does not exist.
        MismatchError: Another rank gives other ranks.

    Example:
        >>> import asyncddp as bf
        >>> def members():
        ...     init_process_group()
        ...     return new_group([2, 0]).ranks
        >>> with bf.local_world(3) as world:
        ...     world.run(members)
        [(0, 2), (0, 2), (0, 2)]
    """
    state, context = _state(), current()
    wanted = range(context.size) if ranks is None else ranks
    members = tuple(sorted(check_rank("new_group", "ranks", one, context.size) for one in wanted))
    if not members or len(set(members)) != len(members):
        raise ArgumentError(
            f"new_group: argument ranks: expected at least one rank, and each once, got {members}"
        )
    claim = "new_group needs the same ranks, in calls of the same order, on all ranks"
    require_equal_on_all_ranks(context, claim, [f"ranks {members} in call {state.groups}"])
    barrier()  # then no rank waits for messages of another one, which is in split_context already
    part = split_context(context, members)
    group = BaguaProcessGroup(members, str(state.groups), part)
    state.groups += 1
    return group


def from_torch_group(group: Any, stream: Any = None) -> BaguaProcessGroup:
    """Create a group with the ranks of a torch.distributed group; collective.

    Ranks are those of torch.distributed, which must be the same as here. The other arguments and
    errors are those of :func:`new_group`.
    """
    return new_group(torch.distributed.get_process_group_ranks(group), stream)


def _state() -> _State:
    if not is_initialized():
        raise ProcessGroupError(
            "bagua is not initialised: call bagua.init_process_group() first, on all ranks"
        )
    return cast("_State", current().extensions[_KEY])
