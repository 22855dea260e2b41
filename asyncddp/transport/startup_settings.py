"""Settings that all ranks must share, compared in ``init()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import asyncddp
from asyncddp.agreement import compare
from asyncddp.config import Config

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
    """Raise a MismatchError for the first rank whose settings differ from those of rank 0."""
    shown = [{name: repr(value) for name, value in settings.items()} for settings in every]
    claim = f"rank {rank}: init(): all ranks need the same settings"
    remedy = "; set it alike for all ranks, as asyncddp run and the -x of mpirun do"
    compare(shown, claim, remedy)
