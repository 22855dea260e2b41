"""Tensors of a sharded replica in a folder, in the format of ``torch.distributed.checkpoint``.

Torch plans, writes and reads: each rank writes its parts, and reads parts of any other sizes. Ranks
exchange the plans by this library's verbs, so that every wait has a deadline, and no process group
of torch is needed. Plans and torch's own file of them are pickles, as torch makes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncddp.checkpoint.files import digest_of
from asyncddp.checkpoint.folder import DCP_METADATA, remove_shards
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import EnvironmentProblem
from asyncddp.ops.joint_action import together
from asyncddp.ops.object_collectives import allgather_object

_VERB = "in its replica"


def write_shards(
    folder: Path, tensors: dict[str, Any], inner: Context
) -> dict[str, tuple[int, str]]:
    """Write a replica's tensors, each rank its parts; collective over the ranks of the replica.

    Args:
        folder: The folder, in which older files are removed.
        tensors: Nested dicts of tensors, with the same keys on all ranks.
        inner: The ranks of the replica.

    Returns:
        Sizes and digests of the files that this rank has written, by folder and name.

    Raises:
        OSError: A rank of the replica could not write.
    """

    def describe() -> dict[str, tuple[int, str]]:
        every = {name: folder / name for name in names}
        return {
            f"{folder.name}/{name}": (file.stat().st_size, digest_of(file))
            for name, file in every.items()
        }

    try:
        with use(inner):
            names = _write(folder, tensors, inner)
            return together(_VERB, f"read {folder}", describe)
    except EnvironmentProblem as error:
        raise OSError(str(error)) from error


def _write(folder: Path, tensors: dict[str, Any], inner: Context) -> set[str]:
    """Write this rank's parts, and on the first rank torch's metadata; return the names."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    what, first = f"write {folder}", inner.is_first
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    writer = FileSystemWriter(folder)

    def plan() -> Any:
        planner.set_up_planner(tensors, writer.storage_meta(), first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def write() -> Any:
        own = writer.prepare_global_plan(every)[inner.rank]
        return writer.write_data(planner.finish_plan(own), planner).wait()

    together(_VERB, what, lambda: remove_shards(folder) if first else None)
    plans = allgather_object(together(_VERB, what, plan))
    every, metadata = together(_VERB, what, lambda: planner.create_global_plan(plans))
    written = together(_VERB, what, write)
    results = allgather_object(written)
    together(_VERB, what, lambda: writer.finish(metadata, results) if first else None)
    return {one.storage_data.relative_path for one in written} | (
        {DCP_METADATA} if first else set()
    )


def read_shards(folder: Path, tensors: dict[str, Any]) -> None:
    """Read this rank's parts of tensors that :func:`write_shards` has written, into ``tensors``.

    Not collective. Damaged files raise one of ``FILE_ERRORS``.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
