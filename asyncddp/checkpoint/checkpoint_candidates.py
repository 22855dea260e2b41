"""Checkpoints found on the ranks' disks, and checks that their files are complete."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncddp.checkpoint.files import digest_of
from asyncddp.checkpoint.folder import HALF_WRITTEN, list_checkpoints
from asyncddp.checkpoint.replica_placement import ReplicaPlacement
from asyncddp.context import current
from asyncddp.ops.joint_action import together
from asyncddp.ops.object_collectives import gather_records

logger = logging.getLogger("asyncddp")

_VERB = "load_checkpoint"


@dataclass(frozen=True)
class CheckpointCandidate:
    """Checkpoint that at least one rank has, with each rank's list of its complete files."""

    folder: str
    content: Mapping[str, Any]
    files: Sequence[Sequence[str]]

    def is_exact(self, replicas: str | None, place: ReplicaPlacement) -> bool:
        """Return whether each replica goes on with its own model."""
        same = self.content["world_size"] == place.column.size
        return same and self.content["replicas"] == "all" and replicas is None

    def file_for(self, place: ReplicaPlacement, *, own: bool) -> str:
        """Return the name of the file that a rank reads: its own, or the one for all ranks."""
        names: list[str] = sorted(name for name in self.content["files"] if "/" not in name)
        every = [name for name in names if name.startswith("rank_")]
        if own:
            return every[place.file_number(self.content)]
        return next(name for name in names if name not in every)


def find_candidates(path: Path) -> tuple[list[CheckpointCandidate], dict[str, str], bool]:
    """Gather the checkpoints of all ranks, newest first; collective.

    Logs a warning about incomplete or damaged checkpoints. Also returns, by folder name, why other
    folders are no checkpoints, and whether one of them is damaged.
    """
    saved, others = together(_VERB, f"read {path}", lambda: list_checkpoints(path))
    if current().local_rank == 0:
        for folder, why in others.items():
            logger.warning("%s: %s is skipped: %s", _VERB, folder, why)
    whys = [[folder.name, why] for folder, why in others.items()]
    mine = [[one.folder.name, one.content, one.whole_files()] for one in saved]
    every = gather_records([whys, mine], list[Any], _VERB)
    known = {content["id"]: (name, content) for _, one in every for name, content, _ in one}
    whole = [{content["id"]: files for _, content, files in one} for _, one in every]
    found = [
        CheckpointCandidate(name, content, [files.get(identifier, []) for files in whole])
        for identifier, (name, content) in known.items()
    ]
    found.sort(key=lambda one: (one.content["number"], one.content["id"]), reverse=True)
    unusable = [pair for theirs, _ in every for pair in theirs]
    return found, dict(unusable), any(why != HALF_WRITTEN for _, why in unusable)


def check_own_files(one: CheckpointCandidate, place: ReplicaPlacement) -> None:
    """Check that each rank of whole replicas has its own file."""
    own = sorted(name for name in one.content["files"] if name.startswith("rank_"))
    for rank, name in enumerate(own if place.inner is None else ()):
        if name not in one.files[rank]:
            raise ValueError(
                f"rank {rank} has no whole {name}; replicas='average' needs one file only"
            )


def check_shards(folder: Path, one: CheckpointCandidate, *, own: bool) -> None:
    """Check that all ranks have the files of sharded replicas, and that they are intact.

    Each rank looks at its share of the DCP files; collective.
    """
    of_ranks = ("rank_", "replica_")
    names = sorted(name for name in one.content["files"] if name.startswith(of_ranks) == own)
    for rank, here in enumerate(one.files):
        lacking = next((name for name in names if name not in here), None)
        if lacking is not None:
            raise ValueError(f"rank {rank} has no whole {lacking}; all ranks need the same folder")
    mine = [name for name in names if "/" in name][current().rank :: current().size]

    def check() -> None:
        for name in mine:
            try:
                intact(folder, name, one)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error

    together(_VERB, f"read {folder}", check)


def intact(folder: Path, name: str, one: CheckpointCandidate) -> Path:
    """Return a file after checking its size and digest; older manifests have no digests."""
    digest, file = one.content.get("digests", {}).get(name), folder / name
    if file.stat().st_size != one.content["files"][name]:
        raise ValueError("it has not the size that it was written with")
    if digest is not None and digest != digest_of(file):
        raise ValueError("it is damaged: it has not the digest that it was written with")
    return file
