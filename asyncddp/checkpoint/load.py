"""``load_checkpoint``: resumes from the last checkpoint that all ranks can read."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncddp.checkpoint.files import digest_of
from asyncddp.checkpoint.folder import HALF_WRITTEN, check_place, list_checkpoints, step_of
from asyncddp.checkpoint.random_state import decoded_random_state, restore_random_state
from asyncddp.checkpoint.training_state import HasState, check_fit, load_state, without_own_memory
from asyncddp.context import current
from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.ops.broadcast import broadcast
from asyncddp.ops.joint_action import FILE_ERRORS, together
from asyncddp.ops.object_collectives import gather_records
from asyncddp.ops.settings_agreement import require_equal_on_all_ranks
from asyncddp.optim.parameter_sync import keep_replica
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import from_bytes, to_bytes

logger = logging.getLogger("asyncddp")

_VERB = "load_checkpoint"
_PIECE = 64 << 20  # bytes of a file that travel at a time


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint that was loaded: its step, the user's extra data, its manifest and folder.

    Attributes:
        step: The step after which it was saved.
        extra: What was given as ``extra``.
        manifest: What is known of the run: ``"world_size"``, ``"algorithm"``, ``"round"``,
            ``"replicas"``, ``"time"``, and more.
        exact: Whether each rank goes on with its own model, optimizer and random state.
        folder: The checkpoint's folder.

    Example:
        >>> Checkpoint(20, {"epoch": 3}, {"world_size": 4}, True, Path("step_0000000020")).step
        20
    """

    step: int
    extra: Any
    manifest: Mapping[str, Any]
    exact: bool
    folder: Path


def load_checkpoint(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    *,
    step: int | None = None,
    replicas: str | None = None,
) -> Checkpoint | None:
    """Load the last checkpoint of :func:`save_checkpoint` readable by all ranks; collective.

    Where every rank's own was saved, and the number of ranks is the same, each goes on exactly.
    Otherwise all start from the average, or from rank 0's where that was saved. Call it before the
    first step, or between two barriers.

    Args:
        path: The folder of the run's checkpoints, or that of one of them.
        model: The module, which is given its parameters and buffers.
        optimizer: The optimizer, which is given its state; None leaves that in the file.
        scheduler: The scheduler likewise.
        step: Load the checkpoint of this step, and no other.
        replicas: ``"average"`` takes the average where every rank's own was saved, too.

    Returns:
        Step, ``extra`` and more; None where there is no checkpoint yet, or only a half-written one,
        unless one was named.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: The checkpoint is of another model, other groups or another algorithm, or was
            saved without what is given here; raised on all ranks, and nothing is changed.
        MismatchError: Ranks give different arguments.
        EnvironmentProblem: The one that was named, or each that is there, is damaged or is not
            where the ranks can read it; raised on all ranks, and nothing is changed. One that was
            not named is skipped with a warning while there is an older one.

    Example:
        >>> import asyncddp as bf, tempfile, torch
        >>> def evaluate(folder):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, bf.rank())
        ...     bf.save_checkpoint(folder, model, step=1)
        ...     found = bf.load_checkpoint(folder, model)
        ...     return found.manifest["world_size"], model.weight.item()
        >>> with tempfile.TemporaryDirectory() as folder, bf.local_world(2) as world:
        ...     world.run(evaluate, folder)
        [(2, 0.5), (2, 0.5)]
    """
    together(_VERB, "read its arguments", lambda: _check_arguments(path, model, step, replicas))
    facts = [f"path={os.fspath(path)!r}", f"step={step}", f"replicas={replicas!r}"]
    facts += [f"optimizer {optimizer is not None}", f"scheduler {scheduler is not None}"]
    require_equal_on_all_ranks(current(), f"{_VERB} needs the same arguments on all ranks", facts)
    folder = Path(path)
    named = step_of(folder)
    if step is None and named is not None:
        folder, step = folder.parent, named
    found = _newest(folder, step, replicas)
    if found is None:
        return None
    content, candidate, exact = found
    saved = dict(content)
    if not exact and "optimizer" in saved:
        saved["optimizer"] = without_own_memory(saved["optimizer"])
    together(_VERB, "compare", lambda: check_fit(_VERB, saved, model, optimizer, scheduler))
    together(_VERB, "load", lambda: load_state(saved, model, optimizer, scheduler))
    if exact:
        keep_replica(model)
    if saved["rng"] is not None:
        restore_random_state(saved["rng"])
    manifest = saved["manifest"]
    return Checkpoint(manifest["step"], saved["extra"], manifest, exact, folder / candidate.folder)


def _check_arguments(path: Any, model: Any, step: Any, replicas: Any) -> None:
    check_place(path, model, step)
    if replicas not in (None, "average"):
        raise ArgumentError(f"argument replicas: expected None or 'average', got {replicas!r}")


@dataclass(frozen=True)
class _Candidate:
    """Checkpoint that at least one rank has, with each rank's list of its complete files."""

    folder: str
    content: Mapping[str, Any]
    files: Sequence[Sequence[str]]

    def is_exact(self, replicas: str | None) -> bool:
        """Return whether each rank reads its own file."""
        same = self.content["world_size"] == current().size
        return same and self.content["replicas"] == "all" and replicas is None


def _candidates(path: Path) -> tuple[list[_Candidate], dict[str, str], bool]:
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
        _Candidate(name, content, [files.get(identifier, []) for files in whole])
        for identifier, (name, content) in known.items()
    ]
    found.sort(key=lambda one: (one.content["number"], one.content["id"]), reverse=True)
    unusable = [pair for theirs, _ in every for pair in theirs]
    return found, dict(unusable), any(why != HALF_WRITTEN for _, why in unusable)


def _newest(
    path: Path, step: int | None, replicas: str | None
) -> tuple[dict[str, Any], _Candidate, bool] | None:
    """Read the last checkpoint that all ranks can read; None if there is none; collective."""
    candidates, unusable, damaged = _candidates(path)
    others = sorted({one.content["step"] for one in candidates} - {step})
    wanted = [one for one in candidates if step is None or one.content["step"] == step]
    whys = [f"{path / name}: {why}" for name, why in unusable.items()]
    if step is not None:
        whys = [why for name, why in unusable.items() if step_of(Path(name)) == step]
    for one in wanted:
        try:
            return _read(path, one, replicas), one, one.is_exact(replicas)
        except (ValueError, EnvironmentProblem) as error:
            whys.append(f"{path / one.folder}: {str(error).removeprefix(f'{_VERB}: ')}")
        if step is None and current().local_rank == 0:
            logger.warning("%s: %s is skipped: %s", _VERB, path / one.folder, whys[-1])
    if step is not None:
        raise EnvironmentProblem(
            f"{_VERB}: no checkpoint of step {step} can be read in {path}"
            f"{': ' if whys else ''}{'; '.join(whys)}; others that are there: "
            f"{', '.join(map(str, others)) or 'none'}"
        )
    if wanted or damaged:
        raise EnvironmentProblem(
            f"{_VERB}: none of the checkpoints in {path} can be read. {'; '.join(whys)}. Mend or "
            "remove them to begin anew"
        )
    return None


def _read(path: Path, one: _Candidate, replicas: str | None) -> dict[str, Any]:
    """Read each rank's own file or the shared file, and check that it is of the checkpoint.

    Collective; raises an error on all ranks, or a ValueError on all, without a message between,
    where the files are not where they are needed.
    """
    folder, sizes = path / one.folder, one.content["files"]
    own = sorted(name for name in sizes if name.startswith("rank_"))
    if one.is_exact(replicas):
        for rank, name in enumerate(own):
            if name not in one.files[rank]:
                raise ValueError(
                    f"rank {rank} has no whole {name}; replicas='average' needs one file only"
                )
        file = folder / own[current().rank]
        return together(_VERB, f"read {file}", lambda: _content(_intact(file, one), one))
    name = next(name for name in sizes if name not in own)
    if replicas == "average" and not name.startswith("average"):
        raise ValueError("it was saved with replicas='rank0', and has no average")
    reader = next((rank for rank, here in enumerate(one.files) if name in here), None)
    if reader is None:
        raise ValueError(f"no rank has a whole {name}")
    file, here = folder / name, current().rank == reader
    data = together(_VERB, f"read {file}", lambda: _intact(file, one).read_bytes() if here else b"")
    whole = _broadcast_bytes(data, sizes[name], reader)
    return together(_VERB, f"read {file}", lambda: _content(io.BytesIO(whole), one))


def _intact(file: Path, one: _Candidate) -> Path:
    """Return a file after checking its size and digest; older manifests have no digests."""
    digest = one.content.get("digests", {}).get(file.name)
    if file.stat().st_size != one.content["files"][file.name]:
        raise ValueError("it has not the size that it was written with")
    if digest is not None and digest != digest_of(file):
        raise ValueError("it is damaged: it has not the digest that it was written with")
    return file


def _broadcast_bytes(data: bytes, size: int, root: int) -> bytes:
    """Broadcast the root's bytes to all ranks in pieces; collective."""
    if current().size == 1:
        return data
    here, found = current().rank == root, bytearray()
    for start in range(0, size, _PIECE):
        length = min(_PIECE, size - start)
        part = data[start : start + length]
        own = from_bytes(part, torch.uint8, (length,)) if here else empty((length,), torch.uint8)
        piece = broadcast(own, root)
        found += part if here else to_bytes(piece)
    return bytes(found)


def _content(file: Path | io.BytesIO, one: _Candidate) -> dict[str, Any]:
    """Load and check a file; ``"rng"`` becomes this rank's decoded random state, or None."""
    try:
        content = dict(torch.load(file, map_location="cpu", weights_only=True))
        saved = content["manifest"]
        same = {"id", "step", "world_size"} <= saved.keys() and saved.items() <= one.content.items()
        whole = {"model", "extra", *saved["parts"]} <= content.keys()
        own = content["rng"].get(current().rank)
        if one.content["world_size"] != current().size:
            own = None  # other ranks have other streams
        content["rng"] = None if own is None else decoded_random_state(own)
    except FILE_ERRORS as error:
        first = [*str(error).splitlines(), type(error).__name__][0]
        raise ValueError(f"it is damaged: {first}") from error
    if not (same and whole):
        raise ValueError("it is of another save than the manifest")
    return content
