"""Access to torch.distributed's store at rendezvous, whichever process serves it."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # not said to be exported
    PrefixStore,
    TCPStore,
)

from asyncddp.environments.launchers import TorchEnvironment, torch_world
from asyncddp.errors import EnvironmentProblem
from asyncddp.restrict_listening_sockets import confine, inodes
from asyncddp.transport.sockets.addresses import THIS_MACHINE_ALONE
from asyncddp.transport.startup_deadline import StartupDeadline

_RETRY_SECONDS = 0.05
_ANSWER_TIMEOUT = timedelta(seconds=30)
_servers: dict[tuple[str, int], Any] = {}
"""Stores that this process serves, or asks; they live on for the next ``init()``."""


@dataclass(frozen=True)
class StoreAccess:
    """Access of one rank to torch.distributed's key-value store, where the ranks find each other.

    Attributes:
        prefix: Prefix of the keys, which tells one start of the ranks from another.
        master: Name or address of the machine that serves it.
        port: Its port; 1 where that is not known.
    """

    store: Any
    rank: int
    size: int
    prefix: str
    master: str
    port: int = 1

    @classmethod
    def find(cls, startup: StartupDeadline) -> StoreAccess | None:
        """Find the store of this process's world; None if the world is a single process.

        That of torch's default process group, where the user has made one, else the one that the
        environment announces.
        """
        group = default_group_store()
        if group is not None:
            master = TorchEnvironment().address
            return cls(*group, "group", master) if group[2] > 1 else None
        world = torch_world()
        if world is None or world.size == 1:
            return None
        startup.rank, startup.size = world.rank, world.size
        place = world.address, world.port
        if place not in _servers:
            _servers[place] = _open_store(world, startup)
        prefix = f"attempt-{world.attempt}"
        return cls(_servers[place], world.rank, world.size, prefix, *place)

    def below(self, prefix: str) -> StoreAccess:
        """Return an access to the keys under a further prefix."""
        store = PrefixStore(f"asyncddp/{self.prefix}/{prefix}", self.store)
        return StoreAccess(store, self.rank, self.size, self.prefix, self.master, self.port)

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self._ask(lambda: self.store.set(key, value))

    def get(self, key: str) -> bytes:
        """Read a value that exists."""
        return bytes(self._ask(lambda: self.store.get(key)))

    def has(self, *keys: str) -> bool:
        """Tell whether all keys exist."""
        return bool(self._ask(lambda: self.store.check(list(keys))))

    def missing(self, keys: Sequence[str]) -> list[int]:
        """Return the indices of the keys that do not exist."""
        return [place for place, key in enumerate(keys) if not self.has(key)]

    def _ask(self, call: Any) -> Any:
        try:
            return call()
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise EnvironmentProblem(
                f"rank {self.rank}: init(): the store at {self.master}:{self.port} does not answer "
                f"({first}); the process that serves it, rank 0 or the launcher, has ended"
            ) from error


def _open_store(world: TorchEnvironment, startup: StartupDeadline) -> Any:
    """Serve the store on rank 0, unless the launcher serves it; connect to it elsewhere."""
    serves = world.rank == 0 and not world.serves_store
    if not serves:
        _wait_for_server(world, startup)
    listening = inodes()
    try:
        store = TCPStore(
            world.address,
            world.port,
            world.size,
            serves,
            _ANSWER_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        does = "serve the store" if serves else "reach the store"
        raise EnvironmentProblem(
            f"rank {world.rank}: init(): cannot {does} at MASTER_ADDR={world.address}, "
            f"MASTER_PORT={world.port}: {first}. Set MASTER_PORT to a free port of rank 0's "
            "machine and MASTER_ADDR to an address of it that all ranks reach, alike for all"
        ) from error
    if serves and world.address in THIS_MACHINE_ALONE:
        with contextlib.suppress(OSError):
            confine(known=listening)
    return store


def _wait_for_server(world: TorchEnvironment, startup: StartupDeadline) -> None:
    """Wait until the store listens; its host name may resolve only after its machine is up."""
    served_by = "the launcher" if world.serves_store else "rank 0"
    while True:
        try:
            socket.create_connection((world.address, world.port), timeout=1.0).close()
        except OSError as error:
            place, reason = f"{world.address}:{world.port}", str(error)
        else:
            return
        startup.describe_missing = lambda place=place, reason=reason: (
            f"missing: {served_by}, which serves the store at "
            f"MASTER_ADDR:MASTER_PORT {place} ({reason})"
        )
        problem = startup.check()
        if problem is not None:
            raise problem
        time.sleep(_RETRY_SECONDS)


def default_group_store() -> tuple[Any, int, int] | None:
    """Return store, rank and size of torch's default process group; None if there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, size = distributed.get_rank(), distributed.get_world_size()
    return distributed.distributed_c10d._get_default_store(), rank, size
