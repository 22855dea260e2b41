"""``load_checkpoint``: resumes from the last checkpoint that all ranks can read."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from asyncddp.checkpoint.checkpoint_candidates import (
    CheckpointCandidate,
    check_own_files,
    check_shards,
    find_candidates,
    intact,
)
from asyncddp.checkpoint.folder import (
    check_place,
    shards_of,
    step_of,
)
from asyncddp.checkpoint.random_state import decoded_random_state, restore_random_state
from asyncddp.checkpoint.replica_placement import ReplicaPlacement
from asyncddp.checkpoint.sharded_state import ParameterState, without_own_parts
from asyncddp.checkpoint.shards import read_shards
from asyncddp.checkpoint.training_state import HasState, check_fit, load_state, without_own_memory
from asyncddp.context import current
from asyncddp.context.context import use
from asyncddp.context.mesh_context import replica_context, world_of
from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.ops.broadcast import broadcast
from asyncddp.ops.joint_action import FILE_ERRORS, together
from asyncddp.ops.settings_agreement import require_equal_on_all_ranks
from asyncddp.optim.parameter_sync import keep_replica
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import from_bytes, to_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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
    mesh: DeviceMesh | None = None,
) -> Checkpoint | None:
    """Load the last checkpoint of :func:`save_checkpoint` readable by all ranks; collective.

    Where every rank's own was saved, and the number of ranks is the same, each goes on exactly.
    Otherwise all start from the average, or from rank 0's where that was saved. Call it before the
    first step, or between two barriers. Replicas that are sharded, with ``mesh``, may have been
    sharded in another way: as many replicas go on with their own models and what their method
    remembers, but without random states and residuals of compressors.

    Args:
        path: The folder of the run's checkpoints, or that of one of them.
        model: The module, which is given its parameters and buffers.
        optimizer: The optimizer, which is given its state; None leaves that in the file.
        scheduler: The scheduler likewise.
        step: Load the checkpoint of this step, and no other.
        replicas: ``"average"`` takes the average where every rank's own was saved, too.
        mesh: Where the model is sharded: the dimension of the mesh whose ranks are replicas. Each
            rank reads its parts, of shape ``(rows / ranks of a replica, ...)`` with FSDP2, from a
            checkpoint of parts of any sizes; all ranks need the same folder.

    Returns:
        Step, ``extra`` and more; None where there is no checkpoint yet, or only a half-written one,
        unless one was named.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: The checkpoint is of another model, other groups or another algorithm, or was
            saved without what is given here; it is of whole replicas and ``mesh`` is given, or the
            reverse; raised on all ranks, and nothing is changed.
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
        >>> def resume(folder, model, optimizer, mesh):  # where FSDP2 shards the model
        ...     return bf.load_checkpoint(folder, model, optimizer, mesh=mesh["replica"])
    """
    with use(world_of(replica_context(mesh))):
        place = ReplicaPlacement.of(mesh)
        check = partial(_check_arguments, path, model, step, replicas, mesh)
        together(_VERB, "read its arguments", check)
        facts = [f"path={os.fspath(path)!r}", f"step={step}", f"replicas={replicas!r}"]
        facts += [f"optimizer {optimizer is not None}", f"scheduler {scheduler is not None}"]
        claim = f"{_VERB} needs the same arguments on all ranks"
        require_equal_on_all_ranks(current(), claim, facts)
        folder = Path(path)
        named = step_of(folder)
        if step is None and named is not None:
            folder, step = folder.parent, named
        found = _newest(folder, step, replicas, place)
        if found is None:
            return None
        saved, candidate, own = found
        alike = place.describe(model).items() <= candidate.content.items()
        compare = partial(_fitting, saved, model, optimizer, scheduler, own=own, alike=alike)
        state = together(_VERB, "compare", compare)
        if place.inner is not None:
            parts = shards_of(candidate.file_for(place, own=own), place.column.rank)
            read = partial(read_shards, folder / candidate.folder / parts)
            parameters = ParameterState(model, optimizer)
            together(_VERB, f"read {parts}", lambda: parameters.put_back(state, read))
        together(_VERB, "load", lambda: load_state(state, model, optimizer, scheduler))
        if own:
            keep_replica(model)
        if alike and state["rng"] is not None:
            restore_random_state(state["rng"])
        manifest, place_of_it = state["manifest"], folder / candidate.folder
        return Checkpoint(manifest["step"], state["extra"], manifest, own and alike, place_of_it)


def _check_arguments(path: Any, model: Any, step: Any, replicas: Any, mesh: Any) -> None:
    check_place(path, model, step, mesh)
    if replicas not in (None, "average"):
        raise ArgumentError(f"argument replicas: expected None or 'average', got {replicas!r}")


def _fitting(
    saved: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: HasState | None,
    *,
    own: bool,
    alike: bool,
) -> dict[str, Any]:
    """Return what this rank loads of a file's content; raise an error if it does not fit.

    The content is of this rank's own replica, or not, and of ranks with parts of the same sizes.
    """
    found = dict(saved)
    if not own and "optimizer" in found:
        found["optimizer"] = without_own_memory(found["optimizer"])
    check_fit(_VERB, found, model, optimizer, scheduler)
    if own and not alike and "optimizer" in found:
        found["optimizer"] = without_own_parts(_VERB, found["optimizer"])
    return found


def _newest(
    path: Path, step: int | None, replicas: str | None, place: ReplicaPlacement
) -> tuple[dict[str, Any], CheckpointCandidate, bool] | None:
    """Read the last checkpoint that all ranks can read; None if there is none; collective."""
    candidates, unusable, damaged = find_candidates(path)
    others = sorted({one.content["step"] for one in candidates} - {step})
    wanted = [one for one in candidates if step is None or one.content["step"] == step]
    whys = [f"{path / name}: {why}" for name, why in unusable.items()]
    if step is not None:
        whys = [why for name, why in unusable.items() if step_of(Path(name)) == step]
    for one in wanted:
        place.check_kind(_VERB, one.content)
        try:
            return _read(path, one, replicas, place), one, one.is_exact(replicas, place)
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


def _read(
    path: Path, one: CheckpointCandidate, replicas: str | None, place: ReplicaPlacement
) -> dict[str, Any]:
    """Read each rank's own file or the shared file, and check that it is of the checkpoint.

    Collective; raises an error on all ranks, or a ValueError on all, without a message between,
    where the files are not where they are needed.
    """
    folder, own = path / one.folder, one.is_exact(replicas, place)
    name = one.file_for(place, own=own)
    if not own and replicas == "average" and not name.startswith("average"):
        raise ValueError("it was saved with replicas='rank0', and has no average")
    if place.inner is not None:
        check_shards(folder, one, own=own)
    file = folder / name
    if own:
        check_own_files(one, place)
        return together(
            _VERB, f"read {file}", lambda: _content(intact(folder, name, one), one, place)
        )
    every = zip(current().members, one.files, strict=True)
    reader = next((rank for rank, here in every if name in here), None)
    if reader is None:
        raise ValueError(f"no rank has a whole {name}")
    here = current().rank == reader
    data = together(
        _VERB, f"read {file}", lambda: intact(folder, name, one).read_bytes() if here else b""
    )
    whole = _broadcast_bytes(data, one.content["files"][name], reader)
    return together(_VERB, f"read {file}", lambda: _content(io.BytesIO(whole), one, place))


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


def _content(
    file: Path | io.BytesIO, one: CheckpointCandidate, place: ReplicaPlacement
) -> dict[str, Any]:
    """Load and check a file; ``"rng"`` becomes this rank's decoded random state, or None."""
    try:
        content = dict(torch.load(file, map_location="cpu", weights_only=True))
        saved = content["manifest"]
        same = {"id", "step", "world_size"} <= saved.keys() and saved.items() <= one.content.items()
        whole = {"model", "extra", *saved["parts"]} <= content.keys()
        own = content["rng"].get(place.number)
        content["rng"] = None if own is None else decoded_random_state(own)
    except FILE_ERRORS as error:
        first = [*str(error).splitlines(), type(error).__name__][0]
        raise ValueError(f"it is damaged: {first}") from error
    if not (same and whole):
        raise ValueError("it is of another save than the manifest")
    return content
