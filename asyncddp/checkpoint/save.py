"""``save_checkpoint``: saves all ranks' training state in files that are written atomically."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch.utils._pytree import tree_map_only

from asyncddp.algorithms.wrapper_setup import checked_choice, checked_integer
from asyncddp.checkpoint.files import check_loadable, digest_of, write_tensors
from asyncddp.checkpoint.folder import (
    FORMAT,
    MANIFEST,
    POLICIES,
    check_place,
    file_of,
    list_checkpoints,
    remove_checkpoint,
    remove_old,
    remove_shards,
    shards_of,
    step_folder,
    write_manifest,
)
from asyncddp.checkpoint.random_state import random_state
from asyncddp.checkpoint.replica_placement import ReplicaPlacement
from asyncddp.checkpoint.sharded_state import ParameterState
from asyncddp.checkpoint.shards import write_shards
from asyncddp.checkpoint.training_state import (
    HasState,
    algorithm_of,
    averaged_state,
    compact,
    own_state,
    progress_of,
    saving_ranks,
)
from asyncddp.context import current
from asyncddp.context.context import use
from asyncddp.context.mesh_context import replica_context, world_of
from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.ops.joint_action import together
from asyncddp.ops.object_collectives import gather_records
from asyncddp.ops.settings_agreement import require_equal_on_all_ranks
from asyncddp.tensors.local_parts import shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_VERB, _COLLECT = "save_checkpoint", "collect what is to be saved"


def save_checkpoint(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    *,
    step: int | None = None,
    extra: Any = None,
    replicas: str = "average",
    keep: int | None = 3,
    wait: bool = True,
    timeout: float | None = None,
    mesh: DeviceMesh | None = None,
) -> Path:
    """Save model, optimizer, scheduler and random state of all ranks; collective, between steps.

    Returns on all ranks once the checkpoint is whole on the disk. No parameter changes.

    With ``wait=False`` one rank saves by itself, between two steps of its own, while the others go
    on; always the same one, as in ``if bf.rank() == 0:``, since a save removes what another one has
    half-written. It is for one-sided methods, as is ``average_model(wait=False)``, and the file has
    the average of that. Buffers, optimizer, scheduler and ``extra`` are this rank's own, and no
    state of random generators is saved. The manifest names under ``"missing"`` the ranks that are
    not in the average. Any number of ranks loads the file.

    Args:
        path: The folder of the run's checkpoints, the same on all ranks; made if it is not there.
        model: The module; for a :class:`~asyncddp.DecentralizedDataParallel` its optimizers and
            schedulers are saved with it.
        optimizer: Its optimizer; a :class:`~asyncddp.DistributedOptimizer` with its counters and
            what its method remembers.
        scheduler: A learning rate scheduler, or whatever has a ``state_dict()``.
        step: The number of the checkpoint; None takes the steps that rank 0's wrapper has made.
        extra: Anything that ``torch.load(weights_only=True)`` reads, such as an epoch, or a
            sampler's state; each rank's own with ``"all"``, rank 0's otherwise.
        replicas: What is kept of models that differ: ``"average"``, in one file, from which any
            number of ranks starts; ``"rank0"``, which costs no averaging, for methods that keep
            one model on all ranks; ``"all"``, a file for each rank beside the average, from which
            the same number of ranks goes on exactly.
        keep: How many checkpoints stay, the last saved ones; None for all.
        wait: Whether all ranks save together; False takes what they have published, and
            ``replicas="average"`` alone.
        timeout: With ``wait=False``: seconds for the other ranks' answers, as of
            :func:`average_model`.
        mesh: Where the model is sharded: the dimension of the mesh whose ranks are replicas. The
            ranks of a replica write their parts, each of its shard's shape, in a folder in the
            format of ``torch.distributed.checkpoint``: ``average/`` or ``rank0/`` of one replica,
            ``replica_00000/`` and on for ``"all"``. No rank ever has a whole model. All ranks need
            the same folder. Buffers are those of a replica's first rank, and each rank's own with
            ``"all"``.

    Returns:
        The checkpoint's folder.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: An argument that cannot be, or holds what could not be loaded; raised on all
            ranks before anything is written, as is the next. ``wait=False`` with other replicas,
            with ``mesh``, or where the method publishes none. A model of DTensors without ``mesh``.
        MismatchError: Ranks give different arguments, or have different models.
        EnvironmentProblem: A rank could not write, for example since the disk is full; raised on
            all ranks. Former checkpoints stay as they were.
        WaitTimeoutError: A rank has not come, or not written its file, by the deadline.

    Example:
        >>> import asyncddp as bf, tempfile, torch
        >>> def train(folder):
        ...     model = torch.nn.Linear(1, 1)
        ...     start = bf.load_checkpoint(folder, model)
        ...     bf.save_checkpoint(folder, model, step=10, extra={"epoch": 2})
        ...     again = bf.load_checkpoint(folder, model)
        ...     return start, again.step, again.extra
        >>> with tempfile.TemporaryDirectory() as folder, bf.local_world(2) as world:
        ...     world.run(train, folder)
        [(None, 10, {'epoch': 2}), (None, 10, {'epoch': 2})]
        >>> def save(folder, model, optimizer, mesh):  # where FSDP2 shards the model
        ...     return bf.save_checkpoint(folder, model, optimizer, mesh=mesh["replica"])
    """
    with (
        use(world_of(replica_context(mesh))),
        saving_ranks(model, replicas, timeout, mesh, wait=wait) as of_run,
    ):
        here, place = current().is_first_on_machine, ReplicaPlacement.of(mesh)

        def collect() -> tuple[dict[str, Any], ParameterState]:
            _check_arguments(path, model, step, replicas, keep, mesh, progress_of(model, optimizer))
            state = {**own_state(model, optimizer, scheduler), "extra": extra}
            return state, _checked_parameters(model, optimizer, state)

        state, parameters = together(_VERB, _COLLECT, collect)
        facts = [f"path={os.fspath(path)!r}", f"step={step}", f"replicas={replicas!r}"]
        facts += [f"keep={keep}", f"parts {', '.join(key for key in state if key != 'extra')}"]
        facts += [] if place.inner is None else parameters.forms
        claim = f"{_VERB} needs the same arguments on all ranks"
        require_equal_on_all_ranks(current(), claim, facts)
        mine = {**_described(step, replicas, model, optimizer, state), **place.describe(model)}
        manifest: dict[str, Any] = gather_records({**mine, **of_run}, dict[str, Any], _VERB)[0]
        folder = step_folder(Path(path), manifest["step"])  # rank 0's
        number, suffix = _agreed_number(folder)
        ranks = manifest["world_size"] * place.parts
        contents = _contents(replicas, model, state, suffix, place, ranks)
        try:
            written = _write_files(folder, contents, manifest, place, parameters)
            content = {**manifest, "format": FORMAT, "number": number, **written}
            commit = partial(write_manifest, folder, content) if here else lambda: None
            together(_VERB, f"write {folder / MANIFEST}", commit)
        except EnvironmentProblem:
            _withdraw(folder, contents, place, whole=not suffix)
            raise
        together(_VERB, "remove old ones", lambda: remove_old(Path(path), keep) if here else None)
        return folder


def _check_arguments(
    path: Any, model: Any, step: Any, replicas: Any, keep: Any, mesh: Any, progress: Any
) -> None:
    """Raise an error for a wrong argument of this rank."""
    check_place(path, model, step, mesh)
    checked_choice("argument replicas", replicas, POLICIES)
    if keep is not None:
        checked_integer("argument keep", keep, 1, "None or a whole number")
    if step is None and progress is None:
        raise ArgumentError(
            "argument step: expected a number, since no DistributedOptimizer or "
            "DecentralizedDataParallel was given that counts its steps, got None"
        )


def _checked_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]
) -> ParameterState:
    """Find the tensors of parameters in a state, of which all could be loaded again."""
    for key, value in state.items():
        own = key in ("model", "optimizer")
        check_loadable(key, tree_map_only(torch.Tensor, shard, value) if own else value)
    found = ParameterState(model, optimizer)
    found.check(_VERB, state)
    return found


def _described(
    step: int | None,
    replicas: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the manifest's description of the run."""
    steps, rounds = progress_of(model, optimizer) or (0, None)
    return {
        "step": steps if step is None else step,
        "id": uuid4().hex,
        "replicas": replicas,
        "algorithm": algorithm_of(model, optimizer, state),
        "round": rounds,
        "parts": [key for key in state if key != "extra"],
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": str(torch.__version__),
    }


def _agreed_number(folder: Path) -> tuple[int, str]:
    """Make a checkpoint's folder; agree on its number and file name suffix; collective."""

    def look() -> list[int]:
        folder.mkdir(parents=True, exist_ok=True)
        saved, _ = list_checkpoints(folder.parent)
        again = (folder / MANIFEST).exists()
        return [max((one.number + 1 for one in saved), default=0), int(again)]

    found = together(_VERB, f"write to {folder.parent}", look)
    every = gather_records(found, list[int], _VERB)
    number = max(one[0] for one in every)
    return number, f".{number}" if any(one[1] for one in every) else ""


def _contents(
    replicas: str,
    model: torch.nn.Module,
    state: dict[str, Any],
    suffix: str,
    place: ReplicaPlacement,
    ranks: int,
) -> dict[str, dict[str, Any]]:
    """Return the contents to write on this rank, by file name; collective.

    All ranks of a replica have those to which each gives its part. Where not all the run's ranks
    are here it has no random states.
    """
    number, own_random = place.number, random_state()
    every = dict(gather_records((number, own_random), tuple[int, dict[str, bytes]], _VERB))
    every = every if len(every) == ranks else {}
    found: dict[str, dict[str, Any]] = {}
    if replicas == "all":
        found[file_of("all", number, suffix)] = {**state, "rng": {number: own_random}}
    if replicas != "rank0":
        with use(place.column):
            averaged = averaged_state(model, state)
        if place.column.is_first:
            found[file_of("average", 0, suffix)] = {**averaged, "rng": every}
    elif place.column.is_first:
        found[file_of("rank0", 0, suffix)] = {**state, "rng": every}
    return found


def _write_files(
    folder: Path,
    contents: Mapping[str, dict[str, Any]],
    manifest: dict[str, Any],
    place: ReplicaPlacement,
    parameters: ParameterState,
) -> dict[str, dict[str, Any]]:
    """Write this rank's files; return all ranks' file sizes and digests by name; collective."""

    def write() -> dict[str, tuple[int, str]]:
        found: dict[str, tuple[int, str]] = {}
        every: Iterable[tuple[str, dict[str, Any]]]
        every = ((name, _compacted(content)) for name, content in contents.items())
        if place.inner is not None:
            every = list(every)  # parts are written first, to which all ranks of the replica come
            for name, content in every:
                tensors, parts = parameters.take_out(content), shards_of(name, place.column.rank)
                found |= write_shards(folder / parts, tensors, place.inner)
        for name, content in every:
            if place.is_first or name.startswith("rank_"):
                found[name] = _write_file(folder / name, {**content, "manifest": manifest})
        return found

    mine = together(_VERB, f"write to {folder}", write)
    of_ranks = gather_records(mine, dict[str, tuple[int, str]], _VERB)
    found = {name: one for theirs in of_ranks for name, one in theirs.items()}
    return {
        "files": {name: size for name, (size, _) in found.items()},
        "digests": {name: digest for name, (_, digest) in found.items()},
    }


def _write_file(file: Path, content: Mapping[str, Any]) -> tuple[int, str]:
    try:
        write_tensors(content, file)
    except OSError as error:
        raise EnvironmentProblem(f"could not write {file}: {error}") from error
    return file.stat().st_size, digest_of(file)


def _compacted(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: compact(value) for key, value in content.items()}


def _withdraw(
    folder: Path, names: Mapping[str, Any], place: ReplicaPlacement, *, whole: bool
) -> None:
    """Remove this rank's files of a failed checkpoint, and optionally its whole folder."""
    with contextlib.suppress(OSError):
        for name in names:
            (folder / name).unlink(missing_ok=True)
            if place.inner is not None:
                remove_shards(folder / shards_of(name, place.column.rank))
        if whole:
            remove_checkpoint(folder)
