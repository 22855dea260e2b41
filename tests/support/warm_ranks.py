"""A server of warm ranks: processes that have imported torch, forked for each rank of a run.

``mpirun`` starts the small program :mod:`tests.support.warm_rank` for each rank, which hands its
arguments, environment, folder and standard streams to this server. The server forks a process that
becomes the script, module or text which ``python`` would have run with these arguments, and the
small program ends as that process does. Importing torch and the library takes seconds of a
processor in each rank of each run; a fork takes milliseconds.

The script runs in the true ``__main__``, so that its globals live until the interpreter's end. Each
rank is the head of a session of its own, which is noted in a folder by the session of its run, and
by the mark of its run where its environment has one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("warm_rank.py")
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
_KILL = bytes([signal.SIGKILL])
_LARGE = ("mpmath", "networkx", "numpy", "scipy", "sympy", "torch", "triton", "typing_extensions")
_EXECUTABLE = "ASYNCDDP_TEST_EXECUTABLE"
"""Variable that gives a warm process its ``sys.executable``."""
_MARK = "ASYNCDDP_TEST_MARK"
"""Variable by which some tests know the processes of their run."""

_STAND_IN = """#!{python} -IS
import sys
sys.path.insert(0, {folder!r})
import warm_rank
warm_rank.main({address!r}, sys.argv[1:])
"""
_COMMAND = """#!{python}
import sys
from asyncddp.cli.main import main
sys.executable = {stand_in!r}
main()
"""
_PYTHON = """#!/bin/bash
case "$1 $2" in
    "-m asyncddp") exec "${{0%/*}}/asyncddp" "${{@:3}}" ;;
    "-m asyncddp.cli.doctor.mpi_probe" | "-m benchmarks"* | "-m ipykernel_launcher" | \\
        "-m pytest" | "-m sphinx") {executable}="$0" exec {stand_in} "$@" ;;
esac
exec -a "$0" {python} "$@"
"""
_SCRIPTS = """#!/bin/bash
case "$1 $2" in
    "-c "*) exec {python} "$@" ;;
    "-m asyncddp") exec "${{0%/*}}/asyncddp" "${{@:3}}" ;;
esac
exec {stand_in} "$@"
"""
_FORWARD = """#!/bin/sh
exec {program} "$@"
"""
_LAUNCHER = """#!/bin/sh
PYTHON_EXEC={python} exec {python} -m {module} "$@"
"""
_LAUNCHERS = {
    "accelerate": "accelerate.commands.accelerate_cli",
    "torchrun": "torch.distributed.run",
}


class WarmServer:
    """The server as the process of the tests sees it.

    Args:
        environ: The environment in which torch is imported.
        python: The command in place of Python that starts the server: that of another server,
            which has torch already, or Python itself.
        imports: Modules that its ranks have besides, as far as they are installed.

    Attributes:
        python: A program that stands in for Python: it runs what it is given as a warm rank.
        commands: A folder for ``PATH`` whose ``python``, ``asyncddp run`` and other launchers
            start scripts and modules so; ``python -c`` finds nothing imported, as ever. Its
            ``activate`` makes the folder above an environment to batch scripts.
    """

    def __init__(
        self,
        environ: dict[str, str],
        python: Sequence[str] = (sys.executable,),
        imports: Sequence[str] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.address = str(Path(self._folder.name, "server"))
        self._process = subprocess.Popen(
            [*python, str(Path(__file__).resolve()), self.address, *imports],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "the server of ranks did not start"
        atexit.register(self.close)
        folder = str(PROGRAM.parent)
        text = _STAND_IN.format(python=sys.executable, folder=folder, address=self.address)
        self.python = self._install("python", text)
        text = _SCRIPTS.format(python=sys.executable, stand_in=self.python)
        here = self._install("bin/python", text)
        self.commands = str(Path(here).parent)
        self._install("bin/asyncddp", _COMMAND.format(python=sys.executable, stand_in=here))
        self._install("bin/activate", f"PATH={self.commands}:{Path(sys.executable).parent}:$PATH")
        for name in ("mpirun", "mpiexec"):
            program = Path(sys.executable).with_name(name)
            if program.exists():
                self._install(f"bin/{name}", _FORWARD.format(program=program))
        for name, module in _LAUNCHERS.items():
            text = _LAUNCHER.format(python=self.python, module=module)
            self._install(f"bin/{name}", text)

    def _install(self, name: str, text: str) -> str:
        """Write a program into the server's folder; gives its path."""
        path = Path(self._folder.name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    @functools.cached_property
    def environment(self) -> str:
        """A folder that programs take for this Python's environment, with :attr:`commands` in it.

        Its Python says that it lives there, so that ``sys.executable -m asyncddp run`` of any
        program starts warm ranks, too. Programs that need torch themselves are warm as well.
        """
        here = Path(sys.prefix)
        text = _PYTHON.format(python=sys.executable, stand_in=self.python, executable=_EXECUTABLE)
        python = self._install("environment/bin/python", text)
        tools = Path(python).parent
        for name in ("asyncddp", "mpirun", "mpiexec"):
            if Path(self.commands, name).exists():
                (tools / name).symlink_to(Path(self.commands, name))
        for held in here.iterdir():
            # without our scripts' notes it is the user's own to them, used as it is
            if held.name not in {"bin", ".asyncddp"}:
                (tools.parent / held.name).symlink_to(held)
        return str(tools.parent)

    @property
    def pid(self) -> int:
        """Id of the server's process and session."""
        return self._process.pid

    def sessions_of(self, run: int | str) -> list[int]:
        """The sessions of a run's warm ranks, given the run's own session or its mark."""
        noted = Path(self._folder.name, str(run))
        return [int(note.name) for note in noted.iterdir()] if noted.exists() else []

    def command(self, *words: str) -> list[str]:
        """The program, in place of Python, that runs a script, ``-m module`` or ``-c text``."""
        return [sys.executable, "-I", "-S", str(PROGRAM), self.address, *words]

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(20)
        self._folder.cleanup()


def receive_rank(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive what a rank is to run, and its three standard streams."""
    head, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
    (length,) = _LENGTH.unpack(head)
    text = b""
    while len(text) < length:
        text += connection.recv(length - len(text))
    return json.loads(text), streams


class _Ranks:
    """The forked processes, and the connections to the programs that asked for them."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._folder = Path(listener.getsockname()).parent
        self._connections: dict[int, socket.socket] = {}

    def serve(self) -> dict[str, Any]:
        """Fork a process for each rank that asks; returns in the forked process alone."""
        while True:
            waiting = [0, self._listener, *self._connections.values()]
            ready, _, _ = select.select(waiting, [], [], 0.02)
            if 0 in ready:
                self._end()
            for pid, connection in list(self._connections.items()):
                if connection in ready:
                    self._pass_signals_on(pid, connection)
            if self._listener in ready and (given := self._fork()) is not None:
                return given
            self._tell_endings()

    def _end(self) -> None:
        """End with the tests, and with all ranks."""
        for pid in self._connections:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _pass_signals_on(self, pid: int, connection: socket.socket) -> None:
        """Send a rank what its program got; SIGKILL where the program is gone."""
        try:
            numbers = connection.recv(16) or _KILL
        except ConnectionResetError:
            numbers = _KILL
        for number in numbers:
            os.kill(pid, number)
        if numbers == _KILL:
            os.waitpid(pid, 0)
            self._connections.pop(pid).close()

    def _fork(self) -> dict[str, Any] | None:
        """Fork a process for a program that asks: what it is to run there, None in the server."""
        connection, _ = self._listener.accept()
        given, streams = receive_rank(connection)
        mark = given["environ"].get(_MARK)
        asker = _asker(connection)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            _join_namespaces(asker)
            for one in (self._listener, connection, *self._connections.values()):
                one.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
        else:
            self._connections[pid] = connection
            self._note(asker, pid, mark)
        for stream in streams:
            os.close(stream)
        return given if pid == 0 else None

    def _note(self, asker: int, rank: int, mark: str | None) -> None:
        """Note a rank by the session of the program that asked for it, and by its run's mark."""
        runs = [mark] if mark else []
        with contextlib.suppress(ProcessLookupError):
            runs.append(str(os.getsid(asker)))
        for name in runs:
            run = self._folder / name
            run.mkdir(exist_ok=True)
            (run / str(rank)).touch()

    def _tell_endings(self) -> None:
        """Tell the programs of the ranks that have ended how they did."""
        while self._connections:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            with self._connections.pop(pid) as connection, contextlib.suppress(OSError):
                connection.sendall(struct.pack("!i", code))


def _asker(connection: socket.socket) -> int:
    """The process id of the program that asks for a rank."""
    size = _CREDENTIALS.size
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(_CREDENTIALS.unpack(found)[0])


def _join_namespaces(asker: int) -> None:
    """Be on the host and see the files of the program that asks, where these are its own."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    for kind in ("uts", "net", "mnt"):
        theirs = Path(f"/proc/{asker}/ns/{kind}")
        if not theirs.exists() or theirs.readlink() == Path(f"/proc/self/ns/{kind}").readlink():
            continue
        with theirs.open() as space:
            if setns(space.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {theirs}")


def prepare(given: dict[str, Any]) -> None:
    """Take over a rank's environment, folder and arguments."""
    os.environ.clear()
    os.environ.update(given["environ"])
    sys.executable = os.environ.pop(_EXECUTABLE, sys.executable)
    os.chdir(given["folder"])
    if rank_zero := sys.modules.get("lightning.fabric.utilities.rank_zero"):
        rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0  # as when it is imported here
    sys.argv = given["arguments"]
    unbuffered = sys.argv[0] == "-u"
    del sys.argv[:unbuffered]
    if sys.argv[0] == "-m":
        sys.path[0] = str(Path.cwd())
    else:
        sys.path[0] = "" if sys.argv[0] == "-c" else str(Path(sys.argv[0]).parent)
    further = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in further if path and path not in sys.path]
    for path in filter(None, further):  # as Python's start does
        with contextlib.suppress(FileNotFoundError):
            runpy.run_path(str(Path(path, "sitecustomize.py")))
    for stream in (sys.stdout, sys.stderr):
        buffered = stream is not sys.stderr and not os.isatty(1)
        stream.reconfigure(line_buffering=not buffered, write_through=unbuffered)


def freeze() -> None:
    """Let the garbage collector leave out all that is here already, such as torch.

    Where Triton would report at the end what is left of it, all is collected then: this takes a
    forked process most of a second, since each page that the collector looks at is copied.
    """
    gc.freeze()
    if _reports_leaks():
        atexit.register(gc.unfreeze)


def _reports_leaks() -> bool:
    """Whether Triton says at the interpreter's end what is left of it."""
    triton = sys.modules.get("triton")
    return bool(triton) and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


def spare_libraries_at_the_end() -> None:
    """Let this process end before the libraries that were loaded before the fork clean up."""
    libc = ctypes.CDLL(None)
    for last in (libc._exit, libc.fcloseall):  # the last one that is given runs first
        libc.on_exit(last, None)


def import_all(further: Sequence[str]) -> None:
    """Import what scripts of ranks use; the collector and the interpreter's end leave it out.

    Clearing torch at the end takes a forked process longer than all else that it does, since each
    page that it writes to is copied. What is imported so late finds what it finds in any Python.
    """
    cleared: dict[str, Any] = {}
    atexit.register(sys.modules.update, cleared)  # as the first one, so that it runs as the last
    import torch

    import asyncddp

    for name in asyncddp.__all__:
        getattr(asyncddp, name)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports torch._dynamo
    known = {name for name in sys.modules if name.split(".")[0] not in _LARGE}
    for name in further:
        if importlib.util.find_spec(name.split(".")[0]):
            importlib.import_module(name)
    freeze()
    if not _reports_leaks():
        spared = {name: one for name, one in sys.modules.items() if name not in known}
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(spared))
        cleared.update(dict.fromkeys(spared))
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # torch's operators


if __name__ == "__main__":
    import_all(sys.argv[2:])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        os.write(1, b"ready\n")
        given = _Ranks(listener).serve()
    prepare(given)
    spare_libraries_at_the_end()
    for name in [name for name in globals() if not name.startswith("__")]:
        del globals()[name]
    del name
    if __import__("sys").argv[0] == "-m":
        del __file__, __import__("sys").argv[0]
        __import__("runpy")._run_module_as_main(__import__("sys").argv[0])
    elif __import__("sys").argv[0] == "-c":
        del __file__
        exec(__import__("sys").argv.pop(1))
    else:
        __file__ = __import__("sys").argv[0]
        exec(compile(__import__("pathlib").Path(__file__).read_text(), __file__, "exec"))
