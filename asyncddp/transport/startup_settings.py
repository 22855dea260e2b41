"""Settings that all ranks must share, compared in ``init()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import asyncddp
from asyncddp.config import Config
from asyncddp.errors import MismatchError

Settings: TypeAlias = dict[str, str | int | bool | None]


def shared_settings(config: Config, default_transport: str) -> Settings:
    """List the settings of this rank that must be equal on all ranks, by their variables."""
    return {
        "the version of asyncddp": asyncddp.__version__,
        "ASYNCDDP_TRANSPORT": config.transport or default_transport,
        "ASYNCDDP_DEVICE_TRANSPORTS": config.device_transports,
        "ASYNCDDP_RANKS_PER_MACHINE": config.ranks_per_machine,
        "ASYNCDDP_CHECK": config.check,
    }


def check_settings(rank: int, every: Sequence[Settings]) -> None:
    """Raise a MismatchError for the first setting that differs from rank 0's."""
    for name, first in every[0].items():
        for other, settings in enumerate(every):
            if settings.get(name) != first:
                raise MismatchError(
                    f"rank {rank}: init(): all ranks need the same settings, but "
                    f"{name} is {first!r} on rank 0 and {settings.get(name)!r} on rank {other}; "
                    "set it alike for all ranks, as asyncddp run and the -x of mpirun do"
                )
