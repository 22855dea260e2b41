"""Result of a search for the fastest settings: what was tried, on what, and its file."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

import msgspec
import torch

import asyncddp
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError
from asyncddp.ops.object_collectives import gather_records
from asyncddp.optim.autotune_candidates import Setting

logger = logging.getLogger("asyncddp")


class MeasuredOn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a search was made on: another one has other results.

    Attributes:
        method: The algorithm with its options and settings that the search leaves as they are.
        topology: Name of its graph or schedule.
        model: Number of its trained parameters, and a digest of names, shapes and dtypes.
        ranks_per_machine: For each machine.
        transport: Of the ranks' tensors.
        device: Type and name.
    """

    method: str
    topology: str
    model: str
    ranks_per_machine: list[int]
    transport: str
    device: str

    def differences(self, other: MeasuredOn) -> str:
        """Say in what another one differs, such as ``transport: mpi in place of loopback``."""
        pairs = (
            (name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__
        )
        return "; ".join(
            f"{name}: {theirs} in place of {ours}" for name, ours, theirs in pairs if ours != theirs
        )


class TriedSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Setting that was tried, and what each measurement gave.

    Attributes:
        setting: Arguments of ``DistributedOptimizer``.
        seconds: Seconds of a step, the slowest rank's, by each sweep over the settings.
    """

    setting: Setting
    seconds: list[float]


class AutotuneResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of a search.

    Attributes:
        setting: The arguments of ``DistributedOptimizer`` that it has chosen.
        tried: All settings that were tried, with what was measured.
        measured_on: What it was made on.
        versions: Of asyncddp and torch, for the reader.
        origin: How it came about, such as ``"11 trials"``.
    """

    setting: Setting
    tried: list[TriedSetting]
    measured_on: MeasuredOn
    versions: dict[str, str]
    origin: str


class _Found(msgspec.Struct, frozen=True):
    """Where rank 0 is, and what it has found in its file."""

    place: MeasuredOn
    result: AutotuneResult | None = None
    problem: str | None = None


def versions() -> dict[str, str]:
    """Return the versions of asyncddp and torch."""
    return {"asyncddp": asyncddp.__version__, "torch": str(torch.__version__)}


def describe_place(
    context: Context, method: str, topology: str, named: Iterable[tuple[str, torch.Tensor]]
) -> MeasuredOn:
    """Describe what a search on this world and these parameters is made on."""
    parameters = list(named)
    facts = [f"{name} {tuple(one.shape)} {one.dtype}" for name, one in parameters]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    device = parameters[0][1].device if parameters else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return MeasuredOn(
        method,
        topology,
        f"{sum(one.numel() for _, one in parameters)} parameters, {digest}",
        [len(ranks) for ranks in context.machines.members],
        context.transport.name,
        f"{device.type} {name}".strip(),
    )


def agree_on_place(
    context: Context, place: MeasuredOn, path: str | PathLike[str] | None
) -> tuple[MeasuredOn, AutotuneResult | None]:
    """Return rank 0's place, and the result in its file, None if it has none; collective.

    Raises:
        ArgumentError: On all ranks, if rank 0 cannot use the file.
    """
    found = _Found(place)
    if context.rank == 0 and path is not None:
        try:
            found = _Found(place, _read(path))
        except ArgumentError as error:
            found = _Found(place, problem=str(error))
    with use(context):
        first = gather_records(found, _Found, "autotune")[0]
    if first.problem is not None:
        raise ArgumentError(first.problem)
    return first.place, first.result


def _read(path: str | PathLike[str]) -> AutotuneResult | None:
    """Read a result from a file; None if there is none, but could be."""
    file = Path(path)
    try:
        content = file.read_bytes() if file.exists() else None
    except OSError as error:
        raise ArgumentError(f"Autotune: argument path: {file} cannot be read: {error}") from error
    if content is None:
        if not file.absolute().parent.is_dir():
            raise ArgumentError(
                f"Autotune: argument path: {file.absolute().parent} is no directory; expected a "
                "file that can be written"
            )
        return None
    try:
        result = msgspec.json.decode(content, type=AutotuneResult)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArgumentError(
            f"Autotune: argument path: {file} holds no result of a search ({error}); expected a "
            "file that one has written; remove it, and the next run writes it anew"
        ) from error
    return msgspec.structs.replace(result, origin=f"loaded from {file}")


def write_result(path: str | PathLike[str], result: AutotuneResult) -> None:
    """Write a result to a file, whole or not at all; a warning says where that fails."""
    file = Path(path)
    part = file.with_name(file.name + ".part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
        part.replace(file)
    except OSError as error:
        logger.warning("autotune: the result could not be written to %s: %s", file, error)
