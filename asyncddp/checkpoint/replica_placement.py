"""Position of a rank among the model's replicas, and among the shards of its replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

from asyncddp.context import Context
from asyncddp.context.mesh_context import inner_context, replica_context
from asyncddp.errors import ArgumentError
from asyncddp.tensors.local_parts import is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ReplicaPlacement:
    """Position of a rank among the model's replicas, and among the shards of its replica.

    Attributes:
        column: The ranks of the same part, one of each replica; all ranks if replicas are whole.
        inner: The ranks of this replica; None if replicas are whole.
    """

    column: Context
    inner: Context | None

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> ReplicaPlacement:
        """Find this rank's place; collective at the first use of a mesh."""
        column = replica_context(mesh)
        return cls(column, None if mesh is None else inner_context(column))

    @property
    def parts(self) -> int:
        """Number of ranks of a replica."""
        return 1 if self.inner is None else self.inner.size

    @property
    def is_first(self) -> bool:
        """True if this rank is the first one of its replica."""
        return self.inner is None or self.inner.is_first

    @property
    def number(self) -> int:
        """Number of this rank in files, counted replica by replica."""
        return self.column.rank * self.parts + (0 if self.inner is None else self.inner.rank)

    def describe(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the entries of a manifest about replicas, and about how they are sharded."""
        found: dict[str, Any] = {"world_size": self.column.size}
        if self.inner is not None:
            found |= {"shards": self.parts, "layout": _layout_of(model)}
        return found

    def file_number(self, manifest: Mapping[str, Any]) -> int:
        """Return whose own file this rank reads: its own, or its replica's first rank's."""
        parts: int = manifest.get("shards", 1)
        return self.number if parts == self.parts else self.column.rank * parts

    def check_kind(self, verb: str, manifest: Mapping[str, Any]) -> None:
        """Raise an error if a checkpoint is of whole replicas and these are sharded, or reverse."""
        parts = manifest.get("shards")
        if parts is not None and self.inner is None:
            raise ArgumentError(
                f"{verb}: argument mesh: the checkpoint is of replicas that {parts} ranks share; "
                "expected a dimension of a mesh, such as mesh['replica'], got None; shard the "
                "model, or read the folder average by torch.distributed.checkpoint"
            )
        if parts is None and self.inner is not None:
            raise ArgumentError(
                f"{verb}: argument mesh: the checkpoint is of whole replicas; expected None, got a "
                "dimension of a mesh; load it without mesh before the model is sharded"
            )


def _layout_of(model: torch.nn.Module) -> str:
    facts = [
        (name, str(one.placements), tuple(one.device_mesh.shape))  # type: ignore[attr-defined]
        for name, one in model.named_parameters()
        if is_distributed(one)
    ]
    return sha256(repr(facts).encode()).hexdigest()[:16]
