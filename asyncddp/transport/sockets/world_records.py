"""Records that ranks exchange at rendezvous: machine, addresses, process, settings."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import NamedTuple

from asyncddp.config import Config
from asyncddp.transport.startup_deadline import Settings


class RankRecord(NamedTuple):
    """Record that a rank publishes about itself before any connection exists."""

    machine: str  # equal where ranks reach each other's Unix sockets and processes
    process: int
    unix_name: str  # of its listening socket, in the abstract namespace
    host: str  # the address of the same for other machines
    port: int
    cores: tuple[int, ...]  # that it may use
    settings: Settings  # that all ranks must share

    def unix_address(self) -> str:
        """Return the address of its Unix socket."""
        return f"\0{self.unix_name}"


class WorldRecord(NamedTuple):
    """Records of all ranks of a run, as one rank has received them, and the run's name and key."""

    rank: int
    name: str  # unlike that of any other world, of this or another run
    key: bytes  # by which every connection proves that it is of this run
    records: tuple[RankRecord, ...]
    network_timeout: float = Config.network_timeout

    @property
    def me(self) -> RankRecord:
        """The record of this rank."""
        return self.records[self.rank]

    def machine_ranks(self) -> list[int]:
        """List the ranks of this rank's machine."""
        here = self.me.machine
        return [rank for rank, record in enumerate(self.records) if record.machine == here]


def describe_machine() -> str:
    """Describe the machine, or the container on it, on which this process runs."""
    facts = [socket.gethostname(), str(os.getuid())]
    boot = Path("/proc/sys/kernel/random/boot_id")
    facts.append(boot.read_text().strip() if boot.exists() else "")
    for kind in ("net", "pid"):
        space = Path(f"/proc/self/ns/{kind}")
        facts.append(str(space.readlink()) if space.exists() else "")
    return " ".join(facts)


def make_record(settings: Settings, host: str, port: int, unix_name: str) -> RankRecord:
    """Make the record of this process."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return RankRecord(describe_machine(), os.getpid(), unix_name, host, port, cores, settings)


def single_world() -> WorldRecord:
    """Make the world record of a single rank."""
    record = make_record({}, "", 0, "")
    return WorldRecord(0, secrets.token_hex(8), secrets.token_bytes(16), (record,))
