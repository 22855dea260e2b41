"""The program that ``mpirun`` starts as a rank: asks the server of warm ranks for its process.

It passes signals on to that process and ends as it does: by its exit code or its signal. See
:mod:`tests.support.warm_ranks`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def main(address: str, arguments: list[str]) -> None:
    """Run a script with its arguments as a process of the server, and end as it does."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(OSError):  # the process has ended already
                server.send(bytes([number]))

        for number in PASSED_ON:
            signal.signal(number, pass_on)
        folder = os.getcwd()  # noqa: PTH109 - pathlib is slow to import
        given = {"arguments": arguments, "environ": dict(os.environ), "folder": folder}
        text = json.dumps(given).encode()
        socket.send_fds(server, [struct.pack("!I", len(text))], [0, 1, 2])
        server.sendall(text)
        answer = server.recv(4)
    code = struct.unpack("!i", answer)[0] if answer else -signal.SIGKILL
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
