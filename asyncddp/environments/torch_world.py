"""World of torch.distributed that a launcher announces to this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from asyncddp.environments.launchers import Torch
from asyncddp.errors import EnvironmentProblem

_NEEDED = ("RANK", "WORLD_SIZE")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
_REMEDY = (
    "start the script by torchrun --nproc-per-node N SCRIPT or asyncddp run -np N SCRIPT, which "
    "set them, or unset {given} to run it alone"
)


@dataclass(frozen=True)
class AnnouncedWorld:
    """World that a launcher announces in environment variables, as for ``init_method="env://"``.

    Attributes:
        rank: Rank of this process.
        size: Number of ranks.
        launcher: What has started it, for messages.
        master: Name or address of the machine of the store.
        port: Port of the store.
        agent_store: True if the launcher serves the store; else rank 0 does.
        attempt: Number of this start of the ranks, after failures.
    """

    rank: int
    size: int
    launcher: str
    master: str = ""
    port: int = 0
    agent_store: bool = False
    attempt: str = "0"


def read_world(environ: Mapping[str, str] = os.environ) -> AnnouncedWorld | None:
    """Read the world that the environment announces; None if it announces none.

    Raises:
        EnvironmentProblem: It announces several ranks, but not all that is needed to join them.

    Example:
        >>> read_world({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "29500"})
        AnnouncedWorld(rank=1, size=4, launcher='a launcher of PyTorch', master='h', port=29500, \
agent_store=False, attempt='0')
        >>> read_world({}) is None
        True
    """
    given = {name: environ[name] for name in (*_NEEDED, *_RENDEZVOUS) if name in environ}
    if not given.keys() & set(_NEEDED):
        return None
    size = _number("WORLD_SIZE", given)
    launcher = Torch(environ).command
    if size == 1 or (size is None and given.get("RANK") == "0"):
        return AnnouncedWorld(0, 1, launcher)
    missing = [name for name in (*_NEEDED, *_RENDEZVOUS) if name not in given]
    if missing:
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        raise EnvironmentProblem(
            f"the environment announces a world of several ranks ({shown}), but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: "
            + _REMEDY.format(given=" and ".join(name for name in _NEEDED if name in given))
        )
    rank, port = _number("RANK", given), _number("MASTER_PORT", given)
    if rank is None or size is None or port is None or rank >= size:
        raise EnvironmentProblem(
            f"RANK={rank} and WORLD_SIZE={size}: expected 0 <= RANK < WORLD_SIZE; "
            + _REMEDY.format(given="RANK and WORLD_SIZE")
        )
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return AnnouncedWorld(rank, size, launcher, given["MASTER_ADDR"], port, agent, attempt)


def _number(name: str, given: Mapping[str, str]) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not value.isdigit():
        raise EnvironmentProblem(f"{name}={value!r}: expected a number; set it, or unset it")
    return int(value)
