"""Parameters that several ranks of one replica hold equally, as in tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch

from asyncddp.context.context import use
from asyncddp.ops.allreduce_tensors import broadcast_tensors
from asyncddp.ops.inner_mesh import InnerMesh
from asyncddp.ops.new_group import new_group
from asyncddp.ops.object_collectives import gather_records
from asyncddp.ops.process_group import ProcessGroup
from asyncddp.tensors.byte_views import as_bytes, on_host
from asyncddp.tensors.local_parts import is_distributed, local, shard

_VERB = "comparison of a replica's parts"


class ReplicatedParts:
    """Parameters that several ranks of a replica hold equally, by copies from the lowest rank.

    Each column averages its own copy. Where a method rounds by blocks or at random, or takes what
    has arrived, copies would drift apart. So they have buckets of their own, and after a step the
    other ranks take the bucket and the method's state from the lowest rank, in whose column the
    method runs as it would on whole replicas.

    Args:
        inner: The ranks of this replica; None where replicas are whole.
    """

    def __init__(self, inner: InnerMesh | None) -> None:
        self._inner = None if inner is None or inner.context.size == 1 else inner
        self._holders: dict[str, tuple[int, ...]] = {}
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}

    def find(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Find which of these parameters have copies, if it is not known yet; collective."""
        every_one = dict(named)
        new = {name: one for name, one in every_one.items() if name not in self._holders}
        if self._inner is None or not self._inner.agree(bool(new)):
            return
        with use(self._inner.context):
            copies = holders_of(new, _sharding_ranks(every_one))
            self._holders.update({**dict.fromkeys(new, ()), **copies})
            mine = [list(ranks) for ranks in sorted({*self._holders.values()}) if ranks]
            every = gather_records(mine, list[list[int]], _VERB)
            wanted = {tuple(ranks) for theirs in every for ranks in theirs}
            for ranks in sorted(wanted - self._groups.keys()):
                self._groups[ranks] = new_group(ranks)

    def kinds(self, names: Sequence[str]) -> list[int]:
        """Return a number for each parameter, equal where the same ranks have copies."""
        of_each = [self._holders.get(name, ()) for name in names]
        numbers = {ranks: number for number, ranks in enumerate(sorted({*of_each}))}
        return [numbers[ranks] for ranks in of_each]

    @property
    def exist(self) -> bool:
        """True if a parameter has copies."""
        return bool(self._groups)

    def unify(self, named: Iterable[tuple[str, Sequence[torch.Tensor]]]) -> None:
        """Give all copies the values of their lowest rank; collective inside the replica.

        Args:
            named: The names of parameters, and the tensors of each: its part, and others like it.
        """
        of_each: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for name, tensors in named:
            ranks = self._holders.get(name)
            if ranks:
                of_each.setdefault(ranks, []).extend(tensors)
        for ranks, every in sorted(of_each.items()):
            assert self._inner is not None
            with use(self._inner.context):
                broadcast_tensors(every, ranks[0], self._groups[ranks])


def holders_of(
    named: Mapping[str, torch.Tensor], sharding: Sequence[int] | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the ranks that hold the same part, bit by bit, where there are several; collective.

    Parts have the same name, place in the parameter and shape, and equal values, on ranks over
    which the same model is sharded: stages of a pipeline may have equal names and values, too.

    Args:
        named: The parameters.
        sharding: The ranks over which the model is sharded; None for those of the parameters.
    """
    ranks = _sharding_ranks(named) if sharding is None else sharding
    own = {name: f"{_place_of(one)} over {ranks}" for name, one in named.items() if ranks}
    places = gather_records(own, dict[str, str], _VERB)
    for name, place in own.items():
        if sum(theirs.get(name) == place for theirs in places) > 1:
            own[name] += _digest(named[name])
    every = gather_records(own, dict[str, str], _VERB)
    found = {
        name: tuple(rank for rank, theirs in enumerate(every) if theirs.get(name) == fact)
        for name, fact in own.items()
    }
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


def _sharding_ranks(named: Mapping[str, torch.Tensor]) -> list[int]:
    """Return the ranks of all meshes over which some parameter is sharded, ascending."""
    meshes: list[Any] = [one.device_mesh for one in named.values() if is_distributed(one)]  # type: ignore[attr-defined]
    return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})


def _place_of(tensor: torch.Tensor) -> str:
    """Describe which part of a parameter a rank has: its coordinates where it is sharded."""
    place: list[Any] = [tuple(local(tensor).shape), str(tensor.dtype)]
    if is_distributed(tensor):
        dtensor: Any = tensor
        pairs = zip(dtensor.placements, dtensor.device_mesh.get_coordinate(), strict=True)
        place += [(str(one), at) for one, at in pairs if not one.is_replicate()]
    return repr(place)


def _digest(tensor: torch.Tensor) -> str:
    return sha256(as_bytes(on_host(shard(tensor))).numpy().data).hexdigest()
