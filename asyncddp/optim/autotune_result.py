"""Result of autotuning: the fastest settings, with measurements and conditions of the search."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from statistics import fmean

import msgspec
import torch

import asyncddp
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError
from asyncddp.ops.joint_action import together
from asyncddp.ops.object_collectives import gather_records
from asyncddp.optim.autotune_candidates import Setting

logger = logging.getLogger("asyncddp")


class TuningConditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conditions under which settings were tuned: algorithm, model, ranks and hardware.

    Attributes:
        method: The algorithm with its options and settings that the search leaves as they are.
        topology: Name of its graph or schedule.
        model: Number of its trained parameters, and a digest of names, shapes and dtypes.
        ranks_per_machine: For each machine.
        transport: Transport of the ranks' tensors.
        device: Type and name.
    """

    method: str
    topology: str
    model: str
    ranks_per_machine: list[int]
    transport: str
    device: str

    def differences(self, other: TuningConditions) -> str:
        """Describe how other conditions differ, such as ``transport: mpi in place of loopback``."""
        pairs = (
            (name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__
        )
        return "; ".join(
            f"{name}: {theirs} in place of {ours}" for name, ours, theirs in pairs if ours != theirs
        )


class TriedSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Candidate settings of autotuning, with the measured times of a step.

    Attributes:
        setting: Arguments of ``DistributedOptimizer``.
        seconds: Seconds of a step, the slowest rank's, by each sweep over the settings.
    """

    setting: Setting
    seconds: list[float]


class AutotuneResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of autotuning: the fastest settings, and all measurements.

    Attributes:
        setting: The arguments of ``DistributedOptimizer`` that it has chosen.
        tried: All settings that were tried, with what was measured.
        measured_on: What it was made on.
        versions: Versions of asyncddp and torch, for the reader.
        origin: How it came about, such as ``"11 trials"``.
    """

    setting: Setting
    tried: list[TriedSetting]
    measured_on: TuningConditions
    versions: dict[str, str]
    origin: str


class _Found(msgspec.Struct, frozen=True):
    """Autotune result that a rank has read from its file, and the conditions of its own search."""

    place: TuningConditions
    result: AutotuneResult | None


def versions() -> dict[str, str]:
    """Return the versions of asyncddp and torch."""
    return {"asyncddp": asyncddp.__version__, "torch": str(torch.__version__)}


def describe_place(
    context: Context, method: str, topology: str, named: Iterable[tuple[str, torch.Tensor]]
) -> TuningConditions:
    """Describe the conditions of a search in this world, for these parameters."""
    parameters = list(named)
    facts = [f"{name} {tuple(one.shape)} {one.dtype}" for name, one in parameters]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    device = parameters[0][1].device if parameters else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return TuningConditions(
        method,
        topology,
        f"{sum(one.numel() for _, one in parameters)} parameters, {digest}",
        [len(ranks) for ranks in context.machines.members],
        context.transport.name,
        f"{device.type} {name}".strip(),
    )


def agree_on_place(
    context: Context, place: TuningConditions, path: str | PathLike[str] | None
) -> tuple[TuningConditions, AutotuneResult | None]:
    """Return rank 0's conditions, and the result in its file or None; collective.

    Raises:
        ArgumentError: On all ranks, if rank 0 cannot use the file.
    """
    given = path if context.is_first else None
    with use(context):
        result = together(
            "Autotune", f"read {path}", lambda: None if given is None else _read(given)
        )
        first = gather_records(_Found(place, result), _Found, "autotune")[0]
    return first.place, first.result


def _read(path: str | PathLike[str]) -> AutotuneResult | None:
    """Read a result from a file; None if the file does not exist."""
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
    """Write a result to a file atomically; log a warning if that fails."""
    file = Path(path)
    part = file.with_name(file.name + ".part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
        part.replace(file)
    except OSError as error:
        logger.warning("autotune: the result could not be written to %s: %s", file, error)


def brief(setting: Setting) -> str:
    """Format a setting in one line.

    Example:
        >>> brief({"bucket_size_in_mb": 0.5, "communication": None, "update_in_backward": False})
        'bucket_size_in_mb=0.5'
    """
    parts = [f"{name}={value}" for name, value in setting.items() if value not in (None, False)]
    return ", ".join(parts)


def text_of(tried: list[TriedSetting], chosen: int | None, title: str) -> str:
    """Format the measurements as a table: the chosen setting first, then the last to be dropped."""
    shown = [
        name
        for name in tried[0].setting
        if len({repr(one.setting[name]) for one in tried}) > 1 or name == "bucket_size_in_mb"
    ]
    rows = [[*shown, "ms a step", "of the chosen", "trials", ""]]
    for index in sorted(range(len(tried)), key=lambda k: (k != chosen, -len(tried[k].seconds), k)):
        one = tried[index]
        ratio = None if chosen is None else _ratio(one, tried[chosen])
        figures = f"{1e3 * fmean(one.seconds):.3g}" if one.seconds else "-"
        cells = [figures, "-" if ratio is None else f"{ratio:.2f}", f"{len(one.seconds) / 2:g}"]
        mark = "chosen" if index == chosen else ""
        rows.append([*(_cell(one.setting[name]) for name in shown), *cells, mark])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" " + "  ".join(map(str.rjust, row, widths)) for row in rows]
    return "\n".join([title, "", lines[0], f" {'─' * (len(lines[0]) - 1)}", *lines[1:], "", ""])


def _ratio(one: TriedSetting, chosen: TriedSetting) -> float | None:
    """Return the ratio of two settings' step times in the same sweeps."""
    return fmean(own) / fmean(chosen.seconds[: len(own)]) if (own := one.seconds) else None


def _cell(value: float | bool | str | None) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
