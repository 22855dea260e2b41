"""``save_checkpoint`` and ``load_checkpoint`` with Bagua's files, optionally one for each rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.checkpoint.files import write_tensors, write_whole
from asyncddp.checkpoint.training_state import HasState
from asyncddp.context import current, is_initialized
from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.ops.joint_action import together
from asyncddp.ops.object_collectives import gather_records

_TRACKER = "latest_checkpointed_iteration.txt"
_COMMON_FILE = "mp_rank_00_model_states.pt"
_RANK_FILE = "rank_{:05d}_states.pt"


def save_checkpoint(
    iteration: int,
    checkpoints_path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: HasState | None = None,
    *,
    per_rank: bool = False,
) -> None:
    """Save a model, an optimizer and a scheduler in Bagua's files; collective.

    Rank 0 writes ``iter_0000010/mp_rank_00_model_states.pt`` for iteration 10, and then the number
    into ``latest_checkpointed_iteration.txt``. A file is whole or not there, and all ranks return
    when it is written. With algorithms that average parameters the ranks' models differ, and the
    file holds rank 0's: save inside :func:`asyncddp.average_model`, or with ``per_rank``.

    Args:
        iteration: The iteration, of at most seven digits if folders are to sort.
        checkpoints_path: The folder, the same for all ranks; created if it is missing.
        model: The model.
        optimizer: Its optimizer.
        lr_scheduler: The scheduler.
        per_rank: Whether each rank writes its own file, from which the same number of ranks resumes
            exactly.

    Raises:
        ArgumentError: The iteration is no whole number, or below 0.
        EnvironmentProblem: A rank could not write, for example because the disk is full; raised on
            all ranks. ``load_checkpoint`` then reads an older checkpoint.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(10, folder, model)
        ...     load_checkpoint(folder, torch.nn.Linear(2, 1))
        10
    """
    verb = "save_checkpoint"
    checked_integer(f"{verb}: argument iteration", iteration, 0)
    rank, size = _place()
    content: dict[str, Any] = {"iteration": iteration, "world_size": size}
    for key, part in (("model", model), ("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if part is not None:
            content[key] = part.state_dict()
    folder = _folder(checkpoints_path, iteration)
    file = folder / (_RANK_FILE.format(rank) if per_rank else _COMMON_FILE)

    def write() -> None:
        if rank == 0 or per_rank:
            folder.mkdir(parents=True, exist_ok=True)
            write_tensors(content, file)

    def track() -> None:
        if rank == 0:
            kept = {_RANK_FILE.format(one) for one in range(size)} if per_rank else {_COMMON_FILE}
            for former in (folder / _COMMON_FILE, *_rank_files(folder)):
                if former.name not in kept:
                    former.unlink(missing_ok=True)
            write_whole(folder.parent / _TRACKER, lambda part: part.write_text(str(iteration)))

    together(verb, f"write {file}", write)
    together(verb, f"write {folder.parent / _TRACKER}", track)


def load_checkpoint(
    checkpoints_path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: HasState | None = None,
    strict: bool = True,
) -> int:
    """Load the latest checkpoint that :func:`save_checkpoint` has saved; collective.

    Each rank loads its own file if there is one for each rank, and otherwise the common file.

    Args:
        checkpoints_path: The folder, the same for all ranks.
        model: The model into which parameters and buffers are loaded.
        optimizer: The optimizer into which the state is loaded.
        lr_scheduler: The scheduler into which the state is loaded.
        strict: Whether the model must have exactly the saved names; Bagua ignores it.

    Returns:
        The iteration, or 0 if nothing has been saved.

    Raises:
        ArgumentError: The optimizer or the scheduler was not saved.
        EnvironmentProblem: A file is missing, damaged, of another number of ranks, or not the same
            on all ranks; raised on all of them.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     load_checkpoint(folder, torch.nn.Linear(2, 1))
        0
    """
    verb = "load_checkpoint"
    path = Path(checkpoints_path)
    iteration = together(verb, f"read {path / _TRACKER}", lambda: _latest(path))
    found = gather_records(iteration, int, verb) if is_initialized() else [iteration]
    if len(set(found)) > 1:
        other = next(rank for rank, one in enumerate(found) if one != found[0])
        raise EnvironmentProblem(
            f"{verb}: rank 0 finds {_described(found[0])} in {path}, and rank {other} finds "
            f"{_described(found[other])}; checkpoints_path must be a folder that all ranks share"
        )
    if iteration < 0:
        return 0
    folder = _folder(path, iteration)
    content = together(verb, f"read {folder}", lambda: _read(folder))
    wanted = {"optimizer": optimizer, "lr_scheduler": lr_scheduler}
    parts = {key: part for key, part in wanted.items() if part is not None}
    for key in parts:
        if key not in content:
            raise ArgumentError(
                f"{verb}: argument {key}: expected None, since {folder} was saved without one; "
                f"give {key} to save_checkpoint too"
            )
    model.load_state_dict(content["model"], strict=strict)
    for key, part in parts.items():
        part.load_state_dict(content[key])
    return iteration


def _place() -> tuple[int, int]:
    """Return this rank and the number of ranks; 0 and 1 for a process outside a world."""
    return (current().rank, current().size) if is_initialized() else (0, 1)


def _folder(path: str | os.PathLike[str], iteration: int) -> Path:
    return Path(path) / f"iter_{iteration:07d}"


def _described(iteration: int) -> str:
    return "no checkpoint" if iteration < 0 else f"iteration {iteration}"


def _rank_files(folder: Path) -> list[Path]:
    return list(folder.glob(_RANK_FILE.replace("{:05d}", "*")))


def _latest(path: Path) -> int:
    """Return the iteration of the latest checkpoint, or -1 if there is none."""
    try:
        text = (path / _TRACKER).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return -1
    if not text.isdecimal() or len(text) > 18:
        raise ValueError(f"expected a number in it, got {text[:40]!r}")
    return int(text)


def _read(folder: Path) -> dict[str, Any]:
    """Read this rank's file, or the common file if ranks have no files of their own."""
    rank, size = _place()
    of_ranks = _rank_files(folder)
    if of_ranks and len(of_ranks) != size:
        raise ValueError(
            f"it has files of {len(of_ranks)} ranks, and this world has {size}; run as many, or "
            "save the average model"
        )
    file = folder / (_RANK_FILE.format(rank) if of_ranks else _COMMON_FILE)
    content = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or "model" not in content:
        raise ValueError(f"{file.name} is no checkpoint of a model")
    return content
