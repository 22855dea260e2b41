"""Folder of checkpoints: file names, the manifest of each checkpoint, removal of old ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.checkpoint.files import write_whole
from asyncddp.errors import ArgumentError
from asyncddp.ops.joint_action import FILE_ERRORS
from asyncddp.serialization import pack
from asyncddp.tensors.local_parts import is_distributed, reshard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("asyncddp")

POLICIES = ("average", "rank0", "all")
MANIFEST, DCP_METADATA = "manifest.json", ".metadata"
FORMAT = 1
HALF_WRITTEN = f"it is half-written: it has no {MANIFEST}, which is written last"
_STEP = re.compile(r"step_(\d{10,})")
_OURS = re.compile(
    r"((average|rank0|rank_\d{5,})(\.\d+)?\.pt|manifest\.json)(\.[0-9a-f]{8}\.part)?"
)
_DCP = re.compile(r"(__\d+_\d+\.distcp|\.metadata)(\.tmp)?")
_SHARDS = re.compile(r"(average|rank0|replica_\d{5,})(\.\d+)?")


@dataclass(frozen=True)
class SavedCheckpoint:
    """Checkpoint on this rank's disk whose manifest could be read.

    Attributes:
        folder: The checkpoint's folder.
        content: The manifest.
    """

    folder: Path
    content: dict[str, Any]

    @property
    def number(self) -> int:
        """Number of checkpoints saved in the parent folder before this one."""
        return int(self.content["number"])

    def whole_files(self) -> list[str]:
        """Return the names of its files that exist here with the size recorded on saving."""
        found = []
        for name, size in self.content["files"].items():
            with contextlib.suppress(OSError):
                if (self.folder / name).stat().st_size == size:
                    found.append(name)
        return found


def check_place(path: Any, model: Any, step: Any, mesh: DeviceMesh | None) -> None:
    """Raise an error for a wrong argument of this rank, for arguments of saving and loading."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"argument path: expected a folder's name, got {path!r}")
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"argument model: expected a torch.nn.Module, got {type(model).__name__}"
        )
    reshard([model])
    sharded = any(map(is_distributed, model.parameters()))
    if sharded and mesh is None:
        raise ArgumentError(
            "argument model: expected ordinary parameters, got DTensors, of which each rank has a "
            "part; give mesh=mesh['replica'], the dimension of the mesh whose ranks are replicas"
        )
    if mesh is not None and not sharded:
        raise ArgumentError(
            "argument mesh: expected None, since no parameter of the model is a DTensor, got a "
            "dimension of a mesh; shard the model before, or leave mesh out"
        )
    if step is not None:
        checked_integer("argument step", step, 0)


def step_folder(path: Path, step: int) -> Path:
    """Return the folder for the checkpoint of a step."""
    return path / f"step_{step:010d}"


def step_of(folder: Path) -> int | None:
    """Return the step from a checkpoint folder's name; None for other names."""
    matched = _STEP.fullmatch(folder.name)
    return int(matched[1]) if matched else None


def file_of(kind: str, rank: int, suffix: str) -> str:
    """Return a file name: ``kind`` all for a rank's own file, else average or rank0."""
    return f"rank_{rank:05d}{suffix}.pt" if kind == "all" else f"{kind}{suffix}.pt"


def shards_of(file: str, replica: int) -> str:
    """Return the name of the folder of a replica's DCP files, beside the file of all else."""
    kind, *suffix = file.removesuffix(".pt").split(".")
    own = f"replica_{replica:05d}" if kind.startswith("rank_") else kind
    return ".".join([own, *suffix])


def list_checkpoints(path: Path) -> tuple[list[SavedCheckpoint], dict[Path, str]]:
    """Return the checkpoints in a folder, newest first, and why other folders are invalid.

    Raises:
        OSError: The folder is there and cannot be read, or it is none.
    """
    saved: list[SavedCheckpoint] = []
    others: dict[Path, str] = {}
    try:
        folders = sorted(path.iterdir())
    except FileNotFoundError:
        return saved, others
    for folder in folders:
        if step_of(folder) is None or not folder.is_dir():
            continue
        try:
            text = (folder / MANIFEST).read_text(encoding="utf-8")
            saved.append(SavedCheckpoint(folder, _checked(json.loads(text))))
        except FileNotFoundError:
            others[folder] = HALF_WRITTEN
        except FILE_ERRORS as error:
            others[folder] = f"{MANIFEST} cannot be read: {error}"
    return sorted(saved, key=lambda one: one.number, reverse=True), others


def _checked(content: Any) -> dict[str, Any]:
    """Check that a manifest has all entries needed for loading, and a correct digest."""
    if not isinstance(content, dict):
        raise ValueError(f"expected a mapping, got {type(content).__name__}")
    kinds = {"format": int, "number": int, "step": int, "id": str, "world_size": int}
    kinds |= {"replicas": str, "files": dict, **({"shards": int} if "shards" in content else {})}
    for key, kind in kinds.items():
        if type(content.get(key)) is not kind:
            raise ValueError(f"expected {key} as {kind.__name__}, got {content.get(key)!r}")
    if content["format"] > FORMAT:
        raise ValueError(
            f"it has format {content['format']}, and this asyncddp reads up to {FORMAT}; update it"
        )
    if content.get("digest", _digest_of(content)) != _digest_of(content):
        raise ValueError("it is damaged: it has not the digest that it was written with")
    _check_files(content)
    pack(content)  # the other ranks will be told of it
    return content


def _check_files(content: dict[str, Any]) -> None:
    """Check that a manifest names the files expected for its kind and number of ranks."""
    replicas, size, files = content["replicas"], content["world_size"], content["files"]
    shared = "rank0" if replicas == "rank0" else "average"
    suffix = "" if f"{shared}.pt" in files else f".{content['number']}"
    own, shards = size if replicas == "all" else 0, content.get("shards", 0)
    whole = [name for name in files if not shards or "/" not in name]
    if replicas not in POLICIES or len(whole) != own * max(shards, 1) + 1:
        raise ValueError(f"{len(whole)} files are not those of replicas={replicas!r}, {size} ranks")
    names = [f"{shared}{suffix}.pt"]
    names += [file_of("all", rank, suffix) for rank in range(len(whole) - 1)]
    if shards:
        names += [f"{shared}{suffix}/{DCP_METADATA}"]
        names += [f"replica_{replica:05d}{suffix}/{DCP_METADATA}" for replica in range(own)]
    for name in names:
        if type(files.get(name)) is not int:
            raise ValueError(f"expected the size of {name} in files, got {files.get(name)!r}")


def _digest_of(content: dict[str, Any]) -> str:
    """Return the digest of a manifest's contents, excluding the digest itself."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=32).hexdigest()


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write a manifest, which turns the files that it names into a checkpoint."""
    text = json.dumps({**content, "digest": _digest_of(content)}, indent=1) + "\n"
    write_whole(folder / MANIFEST, lambda file: file.write_text(text, encoding="utf-8"))


def remove_old(path: Path, keep: int | None) -> None:
    """Remove all but the last ``keep`` checkpoints, incomplete ones, and stray files."""
    try:
        saved, others = list_checkpoints(path)
        for one in saved if keep is None else saved[:keep]:
            _remove_files(one.folder, {MANIFEST, *one.content["files"]})
        for one in [] if keep is None else saved[keep:]:
            remove_checkpoint(one.folder)
        for folder in others:
            if not (folder / MANIFEST).exists():
                remove_checkpoint(folder)
    except OSError as error:
        logger.warning("save_checkpoint: old checkpoints in %s are left: %s", path, error)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint's files, manifest first, and then its folder if it is empty."""
    (folder / MANIFEST).unlink(missing_ok=True)
    _remove_files(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _remove_files(folder: Path, except_for: Collection[str] = ()) -> None:
    for file in list(folder.iterdir()) if folder.is_dir() else []:
        if _SHARDS.fullmatch(file.name) and file.is_dir():
            remove_shards(file, except_for)
        elif _OURS.fullmatch(file.name) and file.name not in except_for:
            file.unlink(missing_ok=True)


def remove_shards(folder: Path, except_for: Collection[str] = ()) -> None:
    """Remove a replica's DCP files, but those of some names, and their folder if it is empty."""
    for file in list(folder.iterdir()) if folder.is_dir() else []:
        if _DCP.fullmatch(file.name) and f"{folder.name}/{file.name}" not in except_for:
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
