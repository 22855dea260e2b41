"""Joining of a run under way, by a process that takes a lost rank's place on its machine.

The ranks leave the world's record in the folder of their launcher, which only its user can read.
One process joins at a time, so that it knows all others.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from asyncddp.config import Config
from asyncddp.environments.launchers import torch_world
from asyncddp.errors import EnvironmentProblem
from asyncddp.membership import View
from asyncddp.serialization import pack, unpack
from asyncddp.transport.sockets.addresses import open_listeners
from asyncddp.transport.sockets.pending_replacements import ReplacementRequest
from asyncddp.transport.sockets.socket_mesh import SocketMesh
from asyncddp.transport.sockets.world_records import WorldRecord, make_record
from asyncddp.transport.startup_deadline import StartupDeadline, check_settings, shared_settings
from asyncddp.whole_files import written_whole

_WORLD, _LOCK = "world", "joining"
_POLL_SECONDS = 0.005


def publish(world: WorldRecord, config: Config) -> None:
    """Write the world's record for processes that join; nothing without a launcher's folder."""
    if config.elastic and config.report_dir is not None:
        with written_whole(Path(config.report_dir, _WORLD)) as part:
            part.touch(0o600)
            part.write_bytes(pack(world))


class ReplacementJoin:
    """Pending join of a replacement process, connected to the other ranks but not yet a member.

    Attributes:
        mesh: Its connections to all of them.
        view: The others' view.

    Raises:
        EnvironmentProblem: The launcher's folder or all other ranks are gone.
        MismatchError: A setting that all ranks must share differs.
        WaitTimeoutError: Another process joins, or the others do not answer, until the deadline.
    """

    def __init__(self, startup: StartupDeadline) -> None:
        self._startup, announced = startup, torch_world()
        folder = startup.config.report_dir
        if folder is None or announced is None or not Path(folder, _WORLD).exists():
            raise EnvironmentProblem(
                "init(): ASYNCDDP_REPLACES is set, but there is no run to join: 'asyncddp run "
                "--elastic --restarts N' sets it where it replaces a rank; unset it elsewhere"
            )
        startup.rank, startup.size = announced.rank, announced.size
        self._lock = os.open(Path(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._wait("another process, which joins", self._try_lock)
        world = unpack(Path(folder, _WORLD).read_bytes(), WorldRecord, "the record of the run")
        listeners = open_listeners(announced.address, announced.port)
        listeners.tcp.close()
        settings = shared_settings(startup.config, "c10d")
        self._mine = make_record(settings, listeners.host, listeners.port, listeners.unix_name)
        records = list(world.records)
        records[announced.rank] = self._mine
        check_settings(announced.rank, [record.settings for record in records])
        world = world._replace(rank=announced.rank, records=tuple(records))
        self.mesh = SocketMesh(world, [listeners.unix], joins=True)
        self._ask(ready=False)
        self.view = self._meet()

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _wait(self, missing: str, done: Callable[[], bool]) -> None:
        self._startup.describe_missing = lambda: f"missing: {missing}"
        while not done():
            error = self._startup.check()
            if error is not None:
                raise error
            time.sleep(_POLL_SECONDS)

    def _living(self) -> set[int]:
        mesh = self.mesh
        return set(range(mesh.size)) - mesh.failed.keys() - mesh.departed - {mesh.rank}

    def _ask(self, *, ready: bool) -> None:
        for peer in self._living():
            self.mesh.ask(peer, ReplacementRequest(self._mine, ready))

    def _has_answers(self) -> bool:
        with self.mesh.lock:
            self.mesh.progress()
        return self._living() <= self.mesh.answers.keys()

    def _meet(self) -> View:
        """Wait until all others have answered; return the newest of their views."""
        self._wait("answers of the others", self._has_answers)
        answers = [self.mesh.answers[peer] for peer in self._living()]
        if not answers:
            raise EnvironmentProblem(
                f"init(): the run to join has ended: none of its {self.mesh.size - 1} other ranks "
                "can be reached"
            )
        return max((answer.view for answer in answers), key=lambda view: view.number)

    def ask_to_be_let_in(self) -> None:
        """Ask the lowest of the others for a view with this rank."""
        with self.mesh.lock:
            peer = min(self._living(), default=None)
            if peer is None:
                raise EnvironmentProblem("the run to join has ended: none of its ranks is left")
            self.mesh.answers.pop(peer, None)
            self.mesh.ask(peer, ReplacementRequest(self._mine, ready=True))

    def refusal(self) -> str:
        """Return why the others do not let this rank in; empty if they have not said so."""
        return next((a.refusal for a in self.mesh.answers.values() if a.refusal), "")

    def finish(self) -> None:
        """Let the next process join."""
        self.mesh.joins = False
        publish(self.mesh.world, self._startup.config)
        os.close(self._lock)
