"""Rendezvous of all ranks through torch.distributed's store, with a report of missing ranks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from asyncddp.environments.launchers import TorchEnvironment
from asyncddp.errors import EnvironmentProblem, MismatchError, WaitTimeoutError
from asyncddp.rank_list_text import list_ranks
from asyncddp.serialization import pack, unpack
from asyncddp.transport.sockets.addresses import (
    THIS_MACHINE_ALONE,
    ListeningSockets,
    is_loopback,
    open_listeners,
    resolve,
)
from asyncddp.transport.sockets.authentication import StoreAuthenticator, code_of
from asyncddp.transport.sockets.replacement_join import publish
from asyncddp.transport.sockets.socket_mesh import SocketMesh
from asyncddp.transport.sockets.store_access import StoreAccess
from asyncddp.transport.sockets.world_records import (
    RankRecord,
    WorldRecord,
    make_record,
    single_world,
)
from asyncddp.transport.startup_deadline import StartupDeadline, check_settings, shared_settings

_POLL_SECONDS = 0.002
_READ_TIMEOUT = 5.0  # seconds
_WORLD = "world"
_meetings: dict[str, int] = {}
"""Number of the meetings that this process has been to, by the prefix of their store."""
_unfinished: dict[str, ListeningSockets] = {}
"""Sockets of a meeting whose deadline has passed; the next ``init()`` goes on with it."""


def meet(startup: StartupDeadline) -> SocketMesh:
    """Meet all ranks of the world, and connect to the first of them; collective.

    Raises:
        EnvironmentProblem: The environment announces a world that cannot be joined.
        WaitTimeoutError: Some ranks have not come by the deadline.
        MismatchError: A setting that all ranks must share differs.
    """
    access = StoreAccess.find(startup)
    if access is None:
        return SocketMesh(single_world(), ())
    startup.rank, startup.size = access.rank, access.size
    number = _meetings.get(access.prefix, 0)
    listeners = _unfinished.pop(access.prefix, None) or open_listeners(access.master, access.port)
    try:
        world = _exchange_records(access.below(str(number)), listeners, startup)
    except WaitTimeoutError:
        _unfinished[access.prefix] = listeners
        raise
    except BaseException:
        listeners.close()
        raise
    _meetings[access.prefix] = number + 1
    publish(world, startup.config)
    return _connect(world, listeners, access)


def _exchange_records(
    access: StoreAccess, listeners: ListeningSockets, startup: StartupDeadline
) -> WorldRecord:
    """Publish this rank's record and read all records, which rank 0 collects."""
    settings = shared_settings(startup.config, "c10d")
    mine = make_record(settings, listeners.host, listeners.port, listeners.unix_name)
    keys = [f"rank-{rank}" for rank in range(access.size)]
    seal = StoreAuthenticator(
        (startup.config.secret or "").encode(), f"{access.master}:{access.port}"
    )
    access.set(keys[access.rank], seal.close(keys[access.rank], pack(mine)))
    startup.describe_missing = lambda: f"missing: {list_ranks(access.missing(keys)) or 'rank 0'}"
    if access.rank == 0:
        _wait_for(access, keys, startup)
        sealed = [seal.open(key, access.get(key)) for key in keys]
        every = [unpack(one, RankRecord, "the record of a rank") for one in sealed]
        access.set(_WORLD, seal.close(_WORLD, pack((secrets.token_hex(16), every))))
    _wait_for(access, [_WORLD], startup)
    data = seal.open(_WORLD, access.get(_WORLD))
    token, records = unpack(data, tuple[str, list[RankRecord]], "the list of ranks")
    if len(records) != access.size or records[access.rank].unix_name != mine.unix_name:
        raise seal.broken(_WORLD)
    seen = [f"seen-{rank}" for rank in range(access.size)]
    access.set(seen[access.rank], b"")
    try:
        check_settings(access.rank, [record.settings for record in records])
        if not seal.secret:
            _require_unix_sockets(access, records)
    except (MismatchError, EnvironmentProblem):
        _let_others_read(access, seen)
        raise
    key, timeout = code_of(seal.secret, token), startup.config.network_timeout
    return WorldRecord(access.rank, token[:8], key, tuple(records), timeout)


def _require_unix_sockets(access: StoreAccess, records: Sequence[RankRecord]) -> None:
    """Raise if a rank claims another machine, but the launcher says that all are here.

    Whoever reaches the store could say so, and be taken for a rank over TCP.
    """
    here = TorchEnvironment().number("LOCAL_WORLD_SIZE") == access.size
    mine = records[access.rank].machine
    others = [rank for rank, record in enumerate(records) if record.machine != mine]
    if others and (here or access.master in THIS_MACHINE_ALONE):
        raise EnvironmentProblem(
            f"rank {access.rank}: init(): {list_ranks(others)} cannot be reached by Unix sockets, "
            f"though all {access.size} ranks are to be on this machine (MASTER_ADDR="
            f"{access.master}). Where they are in containers of their own set ASYNCDDP_SECRET, "
            "alike for all ranks, by which they know each other"
        )


def _let_others_read(access: StoreAccess, seen: list[str]) -> None:
    """Keep a store served by this process for a moment, so that all ranks find the error."""
    deadline = time.monotonic() + _READ_TIMEOUT
    while access.rank == 0 and not access.has(*seen) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _wait_for(access: StoreAccess, keys: list[str], startup: StartupDeadline) -> None:
    while not access.has(*keys):
        error = startup.check()
        if error is not None:
            raise error
        time.sleep(_POLL_SECONDS)


def _connect(world: WorldRecord, listeners: ListeningSockets, access: StoreAccess) -> SocketMesh:
    """Open the mesh, without TCP if all ranks are on one machine."""
    if len(world.machine_ranks()) == access.size:
        listeners.tcp.close()
        return SocketMesh(world, [listeners.unix])
    here = world.me.machine
    records = [
        record._replace(host=resolve(access.master, access.port)[1][0])
        if record.machine != here and is_loopback(record.host)  # as its own machine sees itself
        else record
        for record in world.records
    ]
    return SocketMesh(world._replace(records=tuple(records)), [listeners.unix, listeners.tcp])
