"""Contents of a Lightning checkpoint that covers all ranks, and the file of each rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4

import torch

from asyncddp.checkpoint.training_state import averaged_optimizer_state, without_own_memory
from asyncddp.context import current
from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.ops.joint_action import FILE_ERRORS, together
from asyncddp.ops.object_collectives import broadcast_object, gather_records
from asyncddp.optim.average_models import average_model

logger = logging.getLogger("asyncddp")

KEY = "asyncddp"


def described(policy: str, algorithm: str, *, alone: bool = False) -> dict[str, Any]:
    """Return a checkpoint's metadata about the run and itself; collective unless ``alone``."""
    name = uuid4().hex if alone else broadcast_object(uuid4().hex)
    facts = {"world_size": current().size, "algorithm": algorithm, "replicas": policy}
    return {**facts, "id": name}


def shared_model_state(policy: str, module: torch.nn.Module) -> dict[str, Any]:
    """Return the model to save: rank 0's, or the average, which is collective."""
    if policy == "rank0":
        return module.state_dict()
    with average_model(module):
        return copied(module.state_dict())


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with copies of its tensors."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def shared_optimizer_state(policy: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer state to save: rank 0's, or the average, which is collective."""
    return without_own_memory(state) if policy == "rank0" else averaged_optimizer_state(state)


def rank_file(filepath: Any) -> str:
    """Return the name of this rank's own file beside a checkpoint, or beside its link target."""
    path = os.fspath(filepath)
    return f"{path if '://' in path else os.path.realpath(path)}.rank{current().rank}"


def write(filepath: Any, action: Callable[[], None]) -> None:
    """Write files on all ranks; an error on one, such as a full disk, is raised on all."""
    together("save_checkpoint", f"write {filepath}", action)


def read(
    filepath: Any,
    load: Callable[[Any], dict[str, Any]],
    *,
    resumes: bool,
    required: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint, with each rank's own states if they exist for the same number of ranks.

    Args:
        filepath: The checkpoint.
        load: Reads a file.
        resumes: Whether the ranks' own states are wanted.
        required: Whether it must be a checkpoint of the strategy, which describes the averaging.

    Raises:
        ArgumentError: It is required to be one, and is not.
        EnvironmentProblem: A rank cannot read its file; raised on all.
    """

    def load_shared() -> dict[str, Any]:
        loaded = dict(load(filepath))
        if required and KEY not in loaded:
            raise ArgumentError(
                f"argument ckpt_path: {filepath} is no checkpoint of AsyncDDPStrategy, so that it "
                "does not tell how averaging goes on. Begin a new run from its weights: "
                "Model.load_from_checkpoint(path), then fit without ckpt_path"
            )
        return loaded

    loaded = together("load_checkpoint", f"read {filepath}", load_shared)
    found = loaded.get(KEY, {})
    every = found.get("replicas") == "all" or found.get("checkpoint") == "per_rank"  # as of old
    if not resumes or not every:
        return loaded
    if found["world_size"] == current().size:
        own = _own_states(filepath, load, found["id"])
        problems = gather_records(own if isinstance(own, str) else "", str, "load_checkpoint")
        if not any(problems) and not isinstance(own, str):
            return {**loaded, **own}
        if current().rank == 0:
            first = next(filter(None, problems))
            logger.warning("%s: all ranks go on from the average, since %s", filepath, first)
    return loaded


def _own_states(
    filepath: Any, load: Callable[[Any], dict[str, Any]], wanted: str
) -> dict[str, Any] | str:
    """Return the states in this rank's own file, or a text on why it cannot be used."""
    file = rank_file(filepath)
    try:
        own = load(file)
        same = own[KEY]["id"] == wanted
    except FILE_ERRORS as error:
        return f"{file} cannot be read: {error}"
    return own if same else f"{file} is of another save"


def remove_rank_files(filepath: Any) -> None:
    """Remove the rank files beside a checkpoint, including those of a larger world."""
    file = Path(filepath)
    for one in file.parent.iterdir() if file.parent.is_dir() else ():
        if one.name.startswith(f"{file.name}.rank"):
            one.unlink(missing_ok=True)


def check_writable(folders: list[Path], *, every_rank: bool) -> None:
    """Raise an error on all ranks if a folder of checkpoints cannot be written; collective."""

    def try_files() -> None:
        for folder in folders if every_rank or current().rank == 0 else []:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                raise EnvironmentProblem(
                    f"cannot write checkpoints to {folder}: {error}; give ModelCheckpoint another "
                    "dirpath, or the Trainer another default_root_dir"
                ) from error

    together("Trainer.fit", "write checkpoints", try_files)
