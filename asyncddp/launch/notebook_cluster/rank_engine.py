"""ipyparallel engine of one rank: the rank's process, which runs notebook cells.

Its engine id is its rank. MPI is initialised by ``asyncddp.init()``, which a cell calls.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
from ipyparallel.engine.app import IPEngine

from asyncddp.environments.launchers import announced
from asyncddp.launch.notebook_cluster.cell_hooks import install_cell_hooks
from asyncddp.launch.notebook_cluster.cluster_spec import MAX_MISSED_HEARTBEATS

_REGISTRATION_TIMEOUT = 60.0  # seconds, as many engines may register at once


class SocketConnector:
    """Connector of ZeroMQ sockets that waits until each peer has answered.

    A ROUTER socket drops messages to a peer that is still connecting.

    Raises:
        TimeoutError: A handshake did not end within ``timeout`` seconds.
    """

    def __init__(self, connect: Callable[..., None], timeout: float) -> None:
        self._connect, self._timeout = connect, timeout
        self._sockets: set[Any] = set()

    def connect(self, socket: Any, url: str, **keys: Any) -> None:
        """Connect a socket; it may already be connected to other peers."""
        self._sockets.add(socket)
        events = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)  # one for all its peers
        self._connect(socket, url, **keys)
        if not events.poll(self._timeout * 1000):
            raise TimeoutError(f"{url} did not answer within {self._timeout:g} s")
        events.recv_multipart()

    def __enter__(self) -> SocketConnector:
        return self

    def __exit__(self, *_: object) -> None:
        for socket in self._sockets:
            socket.get_monitor_socket().close()
            socket.disable_monitor()


class RankEngine(IPEngine):  # type: ignore[misc]  # ipyparallel has no types
    """ipyparallel engine of one rank, which tells its peers if a notebook cell fails."""

    async def complete_registration(
        self, msg: Any, connect: Callable[..., None], maybe_tunnel: Callable[..., Any]
    ) -> None:
        """Install the cell hooks after the controller has registered the engine.

        Clients learn of an engine with its first heartbeat, so each connection that cells come
        through is there before: https://github.com/ipython/ipyparallel/issues/476
        """
        with SocketConnector(connect, _REGISTRATION_TIMEOUT) as connections:
            await super().complete_registration(msg, connections.connect, maybe_tunnel)
        install_cell_hooks(self.kernel)


def main(words: Sequence[str]) -> None:
    """Run an engine on this rank; the profile directory need not exist on this machine."""
    rank = announced("RANK")
    if rank is None:
        sys.exit("an engine is a rank: start it by 'asyncddp notebook start -np N'")
    directory = Path(words[0].removeprefix("--profile-dir="))
    with tempfile.TemporaryDirectory(prefix="asyncddp-engine-") as own:
        profile = directory if directory.is_dir() else Path(own)
        settings = [f"--profile-dir={profile}", f"--timeout={_REGISTRATION_TIMEOUT:g}"]
        settings.append(f"--RankEngine.id={rank}")
        RankEngine.launch_instance(
            argv=[*settings, f"--RankEngine.max_heartbeat_misses={MAX_MISSED_HEARTBEATS}"]
        )


if __name__ == "__main__":
    main(sys.argv[1:])
