"""``baguarun``: Bagua's launcher, which starts the ranks of several hosts over ssh."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import click

from asyncddp.cli.options import PORT_NUMBER
from asyncddp.config import read_variable
from asyncddp.errors import ArgumentError
from asyncddp.integrations.bagua.launch_options import (
    CONTEXT,
    LauncherCommand,
    common_options,
    launch,
)

_HOSTS, _PORT = "BAGUA_NODE_DOMAIN_NAMES", "BAGUA_SSH_PORT"


@click.command("baguarun", cls=LauncherCommand, context_settings=CONTEXT)
@click.option(
    "--host_list",
    metavar="H1:PORT,H2:PORT",
    help=f"Hosts, with ports of ssh; the first is the master [{_HOSTS}].",
)
@click.option("--ssh_port", type=PORT_NUMBER, help=f"Port of ssh on the hosts [{_PORT}].")
@click.option(
    "-x", "exports", metavar="VAR[=V]", multiple=True, help="Variable for the ranks; repeatable."
)
@common_options
def main(
    host_list: str | None, ssh_port: int | None, exports: tuple[str, ...], **given: Any
) -> None:
    """Start PROGRAM on all hosts, as asyncddp run -H H1:NPROC_PER_NODE,… PROGRAM does."""
    names, port = read_hosts(host_list, ssh_port)
    hosts = ",".join(f"{name}:{given['nproc_per_node']}" for name in names)
    launch("baguarun", len(names), given, exports=exports, hosts=hosts, ssh_port=port)


def read_hosts(
    host_list: str | None, ssh_port: int | None, environment: Mapping[str, str] | None = None
) -> tuple[list[str], int | None]:
    """Return the host names, and the ssh port if one is given.

    Args:
        host_list: The value of ``--host_list``.
        ssh_port: The value of ``--ssh_port``.
        environment: Variables that replace options; by default this process's.

    Raises:
        ArgumentError: No host, an invalid entry, or several ports.

    Example:
        >>> read_hosts("h1:2222,h2:2222", None, {})
        (['h1', 'h2'], 2222)
    """
    text, where = host_list, "--host_list"
    if text is None:
        text, where = read_variable(_HOSTS, str, environment) or "", _HOSTS
    if not text.strip():
        raise ArgumentError(
            f"--host_list: expected hosts such as h1:22,h2:22, got none, and {_HOSTS} is not set. "
            "On this machine alone: python -m asyncddp.integrations.bagua.launch"
        )
    given = read_variable(_PORT, str, environment)
    default = _port(given, f"environment variable {_PORT}") if given else None
    default = default if ssh_port is None else ssh_port
    names, ports = [], set()
    for item in text.split(","):
        match = re.fullmatch(r"(\[[^][]+\]|[^][:]+)(?::([0-9]+))?", item.strip())
        if match is None:
            raise ArgumentError(f"{where}: expected hosts such as h1:22,h2:22, got {item!r}.")
        names.append(match[1])
        ports.add(default if match[2] is None else _port(match[2], where))
    if len(ports) > 1:
        raise ArgumentError(
            f"{where}: expected one port of ssh for all hosts, got {text!r}. Leave the ports out, "
            "and give each host its Port in ~/.ssh/config."
        )
    return names, ports.pop()


def _port(text: str, where: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 1 << 16):
        raise ArgumentError(f"{where}: expected {PORT_NUMBER.expected}, got {text!r}.")
    return int(text)


if __name__ == "__main__":
    main(prog_name="python -m asyncddp.integrations.bagua.baguarun")
