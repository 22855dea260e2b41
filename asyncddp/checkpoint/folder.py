"""The folder of checkpoints: names of files, the manifest of each checkpoint, and old ones."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncddp.checkpoint.files import write_whole

logger = logging.getLogger("asyncddp")

MANIFEST = "manifest.json"
FORMAT = 1
_STEP = re.compile(r"step_(\d{10,})")
_OURS = re.compile(
    r"((average|rank0|rank_\d{5,})(\.\d+)?\.pt|manifest\.json)(\.[0-9a-f]{8}\.part)?"
)


@dataclass(frozen=True)
class SavedManifest:
    """A checkpoint on this rank's disk whose manifest can be read.

    Attributes:
        folder: The checkpoint's folder.
        content: The manifest.
    """

    folder: Path
    content: dict[str, Any]

    @property
    def number(self) -> int:
        """How many checkpoints were saved before it in the folder above."""
        return int(self.content["number"])

    def whole_files(self) -> list[str]:
        """Return the names of its files that are here with the size that they were saved with."""
        found = []
        for name, size in self.content["files"].items():
            with contextlib.suppress(OSError):
                if (self.folder / name).stat().st_size == size:
                    found.append(name)
        return found


def step_folder(path: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return path / f"step_{step:010d}"


def step_of(folder: Path) -> int | None:
    """Return the step of a checkpoint's folder by its name; None if it is none."""
    matched = _STEP.fullmatch(folder.name)
    return int(matched[1]) if matched else None


def file_of(kind: str, rank: int, suffix: str) -> str:
    """Return the name of a file: that of the average, of rank 0 for all, or of each rank."""
    return f"rank_{rank:05d}{suffix}.pt" if kind == "all" else f"{kind}{suffix}.pt"


def list_checkpoints(path: Path) -> tuple[list[SavedManifest], dict[Path, str]]:
    """Return the checkpoints in a folder, the last saved first, and why others are none.

    Raises:
        OSError: The folder is there and cannot be read, or it is none.
    """
    saved: list[SavedManifest] = []
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
            saved.append(SavedManifest(folder, _checked(json.loads(text))))
        except FileNotFoundError:
            others[folder] = f"it is half-written: it has no {MANIFEST}, which is written last"
        except (OSError, ValueError) as error:
            others[folder] = f"{MANIFEST} cannot be read: {error}"
    return sorted(saved, key=lambda one: one.number, reverse=True), others


def _checked(content: Any) -> dict[str, Any]:
    """Check that a manifest has what loading needs."""
    kinds = {"format": int, "number": int, "step": int, "id": str, "world_size": int}
    kinds |= {"replicas": str, "files": dict}
    if not isinstance(content, dict):
        raise ValueError(f"expected a mapping, got {type(content).__name__}")
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind):
            raise ValueError(f"expected {key} as {kind.__name__}, got {content.get(key)!r}")
    if content["format"] > FORMAT:
        raise ValueError(
            f"it has format {content['format']}, and this asyncddp reads up to {FORMAT}; update it"
        )
    return content


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write a manifest, by which the files that it names become a checkpoint."""
    text = json.dumps(content, indent=1) + "\n"
    write_whole(folder / MANIFEST, lambda file: file.write_text(text, encoding="utf-8"))


def remove_old(path: Path, keep: int | None) -> None:
    """Remove all but the last ``keep`` checkpoints, half-written ones, and files of none."""
    try:
        saved, others = list_checkpoints(path)
        for one in saved if keep is None else saved[:keep]:
            _remove_files(one.folder, except_for={MANIFEST, *one.content["files"]})
        for one in [] if keep is None else saved[keep:]:
            remove_checkpoint(one.folder)
        for folder in others:
            if not (folder / MANIFEST).exists():
                remove_checkpoint(folder)
    except OSError as error:
        logger.warning("save_checkpoint: old checkpoints in %s are left: %s", path, error)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint's files, the manifest first, and its folder if nothing else is there."""
    (folder / MANIFEST).unlink(missing_ok=True)
    _remove_files(folder, except_for=set())
    with contextlib.suppress(OSError):
        folder.rmdir()


def _remove_files(folder: Path, except_for: set[str]) -> None:
    for file in list(folder.iterdir()) if folder.is_dir() else []:
        if _OURS.fullmatch(file.name) and file.name not in except_for:
            file.unlink(missing_ok=True)
