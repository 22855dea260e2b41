"""Runs of a benchmark's program on hosts made for it, and what its first rank writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.network.host_network import HostNetwork
from benchmarks.network.namespaces import command, hosts, refusal
from benchmarks.subprocess_runs import RunFailedError, run_for_json

__all__ = ["check_hosts", "run_on_hosts"]


def check_hosts() -> None:
    """Make sure that hosts can be made.

    Raises:
        RunFailedError: They cannot; the message says why.
    """
    problem = refusal()
    if problem is not None:
        raise RunFailedError(f"network measures between hosts of its own, and {problem}")


def run_on_hosts(
    network: HostNetwork, module: str, words: Sequence[str], advance: Callable[[str], None]
) -> dict[str, Any]:
    """Make hosts, run a module of this package with ranks on each, and take them down.

    Args:
        network: The hosts.
        module: Its name after ``benchmarks.``; it writes JSON to the file that ``--out`` names.
        words: The module's other arguments.
        advance: Told each line that its first rank prints.

    Returns:
        What the module wrote.

    Raises:
        RunFailedError: Hosts cannot be made, or the run failed.
    """
    with hosts(network):
        launch = command(network.hosts, network.ranks_per_host, module, *words)
        return run_for_json(launch, advance)
