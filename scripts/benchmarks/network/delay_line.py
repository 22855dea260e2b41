"""Program that takes the place of the hosts' bridge and hands frames over after a delay.

Netem does this where the kernel has it, which small kernels of virtual machines do not. Frames are
read and written by packet sockets, large ones uncut and with their offloaded checksums, so that a
gigabit costs thousands of frames a second and not a hundred thousand.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import time
from collections import deque

import click

_ALL_PROTOCOLS = 3
_SOL_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23
_FORCE_SEND_BUFFER, _FORCE_RECEIVE_BUFFER = 32, 33
_HEADER = 10  # bytes of virtio_net_hdr before a frame
_LARGEST = 1 << 17
_BUFFER = 64 << 20
_AT_ONCE = 64  # frames read from a port before what is due is sent


def _port(interface: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, _FORCE_SEND_BUFFER, _BUFFER)
    port.setsockopt(socket.SOL_SOCKET, _FORCE_RECEIVE_BUFFER, _BUFFER)
    port.setblocking(False)
    port.bind((interface, _ALL_PROTOCOLS))
    return port


class _DelayLine:
    """Ports, the addresses behind them, and frames that are not due yet, in the order of time."""

    def __init__(self, interfaces: tuple[str, ...], delay: float) -> None:
        self._delay = delay
        self._ports = {port.fileno(): port for port in map(_port, interfaces)}
        self._behind: dict[bytes, socket.socket] = {}
        self._frames: deque[tuple[float, socket.socket, bytes]] = deque()
        self._buffer = bytearray(_LARGEST)
        self._poll = select.epoll()
        for number in self._ports:
            self._poll.register(number, select.EPOLLIN)

    def turn(self) -> None:
        """Wait for a frame, or until one is due; read what is there and send what is due."""
        wait = None
        if self._frames:
            wait = max(0.0, self._frames[0][0] - time.monotonic())
        for number, _ in self._poll.poll(wait):
            with contextlib.suppress(BlockingIOError):
                for _ in range(_AT_ONCE):
                    self._read(self._ports[number])
        while self._frames and self._frames[0][0] <= time.monotonic():
            _, source, frame = self._frames.popleft()
            self._send(source, frame)

    def _read(self, source: socket.socket) -> None:
        length = source.recv_into(self._buffer)
        frame = bytes(memoryview(self._buffer)[:length])
        self._behind[frame[_HEADER + 6 : _HEADER + 12]] = source
        self._frames.append((time.monotonic() + self._delay, source, frame))

    def _send(self, source: socket.socket, frame: bytes) -> None:
        target = self._behind.get(frame[_HEADER : _HEADER + 6])
        targets = [port for port in self._ports.values() if port is not source]
        for port in targets if target is None else [target]:
            with contextlib.suppress(OSError):
                port.send(frame)


def carry(interfaces: tuple[str, ...], delay: float) -> None:
    """Carry frames between interfaces until one of them is taken down.

    Args:
        interfaces: Ends of the hosts' links on this side; they are taken from their bridge.
        delay: Seconds, in each direction.
    """
    for interface in interfaces:
        subprocess.run(["ip", "link", "set", interface, "nomaster"], check=True)
    line = _DelayLine(interfaces, delay)
    with contextlib.suppress(PermissionError):  # a timer late by a share of a core is another delay
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    click.echo("carrying")
    with contextlib.suppress(OSError):
        while True:
            line.turn()


@click.command()
@click.option("--delay", type=float, required=True, help="Seconds, in each direction.")
@click.argument("interfaces", nargs=-1, required=True)
def main(delay: float, interfaces: tuple[str, ...]) -> None:
    """Take the place of the bridge of INTERFACES."""
    carry(interfaces, delay)


if __name__ == "__main__":
    main()
