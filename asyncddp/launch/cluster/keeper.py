"""The process that holds a cluster: it starts controller and engines, and ends them in any case.

``python -m asyncddp.launch.cluster.keeper`` reads one line of JSON, a :class:`Task`, from standard
input and says in lines of JSON how it goes. Until it reads ``release`` it belongs to the process
that has started it and ends when that one does, however it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from asyncddp.launch.cluster.folder import Folder, Record
from asyncddp.launch.cluster.plan import ENGINE, MISSES, Plan
from asyncddp.launch.processes import die_with_parent, kill_processes_of

__all__ = ["Task", "main"]

_LOOK = 0.1  # seconds between two looks at what is going on
_FILES = 60.0  # seconds for the controller to open its door
_BEAT = 500  # milliseconds; an engine counts as there with its first heartbeat
_GOODBYE = 4.0  # seconds for engines, and then for the controller, to end when asked


@dataclass(frozen=True)
class Task:
    """What a keeper is to do.

    Attributes:
        folder: The profile's folder.
        plan: The cluster.
        owner: The process to which it belongs.
        private: Whether the folder goes with the cluster.
    """

    folder: str
    plan: Plan
    owner: int
    private: bool

    @classmethod
    def read(cls, line: str) -> Task:
        """Read what :func:`json.dumps` has written of one."""
        data = json.loads(line)
        plan = data.pop("plan")
        plan["options"] = tuple(plan["options"])
        return cls(plan=Plan(**plan), **data)


class _Asked(Exception):  # noqa: N818 - no error: somebody wants the end
    """The cluster shall end."""


class _Ended(Exception):  # noqa: N818 - the message says what has ended
    """A part of the cluster has ended of itself."""


class Keeper:
    """Holds one cluster.

    Args:
        task: What to do.
    """

    def __init__(self, task: Task) -> None:
        self._task, self._plan = task, task.plan
        self._folder = Folder(Path(task.folder))
        self._owner: int | None = task.owner
        self._stopping = False
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> int:
        """Start the cluster and hold it until it shall end; gives an exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        name, value = self._folder.mark
        host, mark = socket.gethostname(), f"{name}={value}"
        record = Record(os.getpid(), host, self._plan.ranks, time.time(), mark)
        with self._folder.held(record) as mine:
            if not mine:
                _say(busy=True)
                return 1
            kill_processes_of(mark)  # what a keeper that was killed may have left
            try:
                self._hold()
            except _Asked:
                return 0
            except _Ended as end:
                _say(ended=str(end))
                return 1
            finally:
                self._close(mark)
        return 0

    def _on_signal(self, *_: object) -> None:
        self._stopping = True

    def _hold(self) -> None:
        files = (self._folder.client_file, self._folder.engine_file)
        for file in files:
            file.unlink(missing_ok=True)
        self._start("controller", self._controller())
        until = time.monotonic() + _FILES
        while not all(_is_whole(file) for file in files):
            self._step()
            if time.monotonic() > until:
                raise _Ended(self._words("controller", f"not ready after {_FILES:g} s"))
        _say(ready=str(self._folder.client_file))
        connection = self._folder.engine_file.read_text(encoding="utf-8")
        self._start("engines", self._engines(), IPP_CONNECTION_INFO=connection)
        while True:
            self._step()

    def _controller(self) -> list[str]:
        plan = self._plan
        return [
            *(sys.executable, "-m", "ipyparallel.controller", "--usethreads"),
            *(f"--profile-dir={self._folder.path}", "--IPController.client_ip=127.0.0.1"),
            *(f"--IPController.engine_ip={plan.address}", f"--location={plan.address}"),
            *(f"--IPController.enable_curve={plan.encrypted}", f"--HeartMonitor.period={_BEAT}"),
            f"--HeartMonitor.max_heartmonitor_misses={MISSES}",
        ]

    def _engines(self) -> list[str]:
        ours = (sys.executable, "-m", "asyncddp", "run")
        words = ("-x", "IPP_CONNECTION_INFO", "-m", ENGINE, f"--profile-dir={self._folder.path}")
        return [*ours, *self._plan.options, *words]

    def _start(self, name: str, command: list[str], **variables: str) -> None:
        with self._folder.log(name).open("wb") as log:
            self._children[name] = subprocess.Popen(
                command,
                env={**os.environ, **variables, **dict([self._folder.mark])},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),  # safe: no thread has been started
            )

    def _step(self) -> None:
        """Wait a little, and leave when the cluster shall end or has ended."""
        ready, _, _ = select.select([sys.stdin] if self._owner is not None else [], [], [], _LOOK)
        if ready and sys.stdin.readline() == "release\n":
            self._owner = None
        if self._stopping or (self._owner is not None and (os.getppid() != self._owner or ready)):
            raise _Asked
        for name, child in self._children.items():
            if child.poll() is not None:
                raise _Ended(self._words(name, f"ended with exit code {child.returncode}"))

    def _words(self, name: str, what: str) -> str:
        return f"{name}: {what}; the last that was said:\n{self._folder.last_words(name)}"

    def _close(self, mark: str) -> None:
        """End the engines while the controller still hears of it, then the controller."""
        for name in ("engines", "controller"):
            child = self._children.get(name)
            if child is None:
                continue
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GOODBYE)
        kill_processes_of(mark)
        for child in self._children.values():
            child.wait()
        if self._task.private:
            shutil.rmtree(self._folder.path, ignore_errors=True)


def _is_whole(file: Path) -> bool:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _say(**news: object) -> None:
    """Tell the owner, who may no longer listen."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(news) + "\n")
        sys.stdout.flush()


def main(source: IO[str]) -> int:
    """Hold the cluster that is described on ``source``; gives an exit code."""
    return Keeper(Task.read(source.readline())).run()


if __name__ == "__main__":
    sys.exit(main(sys.stdin))
