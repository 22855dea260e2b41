"""Rendezvous by MPI, which distributes the address of torch's store: ``mpi://`` and ``env://``."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlparse

import torch
from torch._C._distributed_c10d import Store, TCPStore

from asyncddp.config import read_variable
from asyncddp.environments.launchers import TorchEnvironment, launcher_rank_and_size
from asyncddp.errors import EnvironmentProblem
from asyncddp.integrations.torch_distributed.world import TorchWorld
from asyncddp.tensors.allocation import make_tensor, zeros
from asyncddp.tensors.byte_views import from_bytes
from asyncddp.transport import Transport

Meeting: TypeAlias = Iterator[tuple[Store, int, int]]
SCHEME = "mpi"
_DEFAULT_TIMEOUT = timedelta(minutes=30)
_ADDRESS_BYTES = 256
_BACKLOG = 4096  # connections that wait to be accepted


def register_rendezvous() -> None:
    """Register ``mpi://``, and let ``env://`` use it if MASTER_ADDR is not set."""
    module = sys.modules["torch.distributed.rendezvous"]  # a function of torch has the same name
    handlers = module._rendezvous_handlers
    if SCHEME not in handlers:
        module.register_rendezvous_handler(SCHEME, mpi_rendezvous)
        handlers["env"] = _env_or_mpi(handlers["env"])


def mpi_rendezvous(url: str, timeout: timedelta = _DEFAULT_TIMEOUT, **_: Any) -> Meeting:
    """Meet over MPI: yield a store on rank 0, this rank, and the number of ranks; collective.

    The store listens on this machine alone if all ranks are on it.

    Args:
        url: ``mpi://``, with arguments of init_process_group as ``?rank=0&world_size=4``.
        timeout: How long to wait for the other ranks.
        **_: Arguments that torch passes to other rendezvous handlers.

    Raises:
        EnvironmentProblem: Rank or world size are others than MPI's; the message has both numbers.
        WaitTimeoutError: Some ranks have not come.
    """
    world = TorchWorld.open(timeout.total_seconds()).every
    told = parse_qs(urlparse(url).query)
    for name, own in (("rank", world.rank), ("world_size", world.size)):
        _compare(f"argument {name}", told.get(name, ["-1"])[0], own)
        _compare(
            f"environment variable {name.upper()}", read_variable(name.upper(), str) or "-1", own
        )
    yield _open_store(world, timeout), world.rank, world.size
    raise RuntimeError("mpi:// cannot meet again; call init_process_group anew")


def _compare(what: str, given: str, own: int) -> None:
    """Raise an EnvironmentProblem unless a given number (-1 for none) equals MPI's."""
    if given not in ("-1", str(own)):
        raise EnvironmentProblem(
            f"init_process_group: {what}: got {given}, but MPI says {own}; expected MPI's number, "
            "or none, where MPI starts the ranks"
        )


def _open_store(world: Transport, timeout: timedelta) -> Store:
    """Open the store on rank 0 and connect all ranks to it; collective."""
    seconds = timeout.total_seconds()
    mine = make_tensor([world.machine_id()], torch.int64)
    machines = world.allgather(mine, [1] * world.size, seconds).tolist()
    text = zeros((_ADDRESS_BYTES,), torch.uint8)
    store: Store | None = None
    if world.rank == 0:
        host, bind = "127.0.0.1", "127.0.0.1"
        if len(set(machines)) > 1:
            host, bind = TorchEnvironment().address, ""
        with closing(socket.socket()) as listener:
            listener.bind((bind, 0))
            listener.listen(_BACKLOG)
            port = listener.getsockname()[1]
            store = _store(host, port, world.size, timeout, listener.detach())
        data = f"{host} {port}".encode()
        text[: len(data)] = from_bytes(data, torch.uint8, (len(data),))
    world.broadcast(text, 0, seconds)
    host, _, port_text = bytes(text.tolist()).rstrip(b"\0").decode().partition(" ")
    store = store or _store(host, int(port_text), world.size, timeout)
    world.barrier(seconds)  # rank 0, if it fails at once, closes nothing that others connect to
    return store


def _store(
    host: str, port: int, size: int, timeout: timedelta, listening: int | None = None
) -> Store:
    return TCPStore(
        host_name=host,
        port=port,
        world_size=size,
        is_master=listening is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening,
        use_libuv=torch.__version__ >= "2.8",  # which before takes no socket that listens
    )


def _env_or_mpi(torchs: Callable[..., Meeting]) -> Callable[..., Meeting]:
    """Return an ``env://`` handler that uses MPI if MASTER_ADDR is unset and MPI has a launcher."""

    def env_rendezvous(url: str, *args: Any, **kwargs: Any) -> Meeting:
        told = TorchEnvironment()
        if launcher_rank_and_size()[1] == 1 or told.master is not None or told.is_elastic:
            return torchs(url, *args, **kwargs)
        return mpi_rendezvous(url, *args, **kwargs)

    return env_rendezvous
