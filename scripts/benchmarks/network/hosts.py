"""Hosts simulated by network namespaces with limited links, by ``scripts/testhosts``."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ranks import Advance, RunFailedError, python_path, rank_program, run_for_json
from benchmarks.tables import RankGroup

_SCRIPT = Path(__file__).parents[2] / "testhosts"
_DELAY_LINE = Path(__file__).with_name("delay_line.py")
_LINK = "asyncddp-v"  # of each link's end outside its host, as the script names them
_NETWORK = "10.77.0.0/24"
_RESTART = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
_LIMIT = 1800  # seconds for a run
_YIELD = "OMPI_MCA_mpi_yield_when_idle"  # the hosts share few cores, and do not know it


@dataclass(frozen=True)
class HostNetwork:
    """Hosts and the links between them.

    Attributes:
        hosts: How many.
        rate: Of each host's link, as ``scripts/testhosts`` is told.
        latency: Seconds from host to host, besides.
        slow_rate: Of the last host's link instead; None where all are equal.
        ranks_per_host: Ranks that share a host's link.
        keeps_window: Whether TCP goes on after a pause as it was, by
            ``net.ipv4.tcp_slow_start_after_idle=0``, as the guide on slow networks advises; Linux's
            default is to begin slowly.
    """

    hosts: int
    rate: str
    latency: float = 0.0
    slow_rate: str | None = None
    ranks_per_host: int = 1
    keeps_window: bool = False


def _run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    return _run(str(_SCRIPT), *words, start_new_session=True)


def refusal() -> str | None:
    """Why no hosts can be made here now, in a sentence; None where they can."""
    can = _call("check")
    if can.returncode != 0:
        return f"no hosts can be made here: {can.stderr.strip()}"
    if "asyncddp-h" in _run("ip", "netns", "list").stdout:
        return (
            "there are hosts already, which somebody may be using; once nobody is, take them down "
            "with scripts/testhosts down"
        )
    return None


def check_hosts() -> None:
    """Make sure that hosts can be made.

    Raises:
        RunFailedError: They cannot; the message says why.
    """
    problem = refusal()
    if problem is not None:
        raise RunFailedError(f"network measures between hosts of its own, and {problem}")


@contextmanager
def hosts(network: HostNetwork) -> Iterator[None]:
    """Make hosts, and take them down again whatever happens.

    Raises:
        RunFailedError: They cannot be made.
    """
    count = network.hosts
    try:
        made = _call("up", str(count), network.rate)
        if made.returncode != 0:
            raise RunFailedError(f"the hosts cannot be made: {made.stderr.strip()}")
        if network.slow_rate is not None:
            _slow_down(count, network.slow_rate)
        for number in range(1, count + 1) if network.keeps_window else ():
            words = ("ip", "netns", "exec", f"asyncddp-h{number}", "tee", _RESTART)
            _set(f"TCP of h{number}", *words, input="0")
        with _delayed(count, network.latency) if network.latency else nullcontext():
            yield
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop this
        _call("down")
        signal.signal(signal.SIGINT, before)


def _set(what: str, *words: str, **options: Any) -> None:
    done = _run(*words, **options)
    if done.returncode != 0:
        raise RunFailedError(f"{what} stays as it is: {done.stderr.strip()}")


def _slow_down(number: int, rate: str) -> None:
    """Limit what a host sends, and at the other end of its link what it receives."""
    limit = f"root tbf rate {rate} burst 64kb latency 50ms".split()
    inside = ("tc", "-n", f"asyncddp-h{number}", "qdisc", "replace", "dev", "e0")
    outside = ("tc", "qdisc", "replace", "dev", f"{_LINK}{number}")
    for end in (inside, outside):
        _set(f"the link of h{number}", *end, *limit)


@contextmanager
def _delayed(count: int, latency: float) -> Iterator[None]:
    """Hand frames over after a delay, in place of the bridge."""
    words = [sys.executable, str(_DELAY_LINE), "--delay", str(latency)]
    words += [f"{_LINK}{number}" for number in range(1, count + 1)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as line:
        assert line.stdout is not None
        assert line.stderr is not None
        try:
            if not line.stdout.readline():
                raise RunFailedError(f"nothing can be delayed here: {line.stderr.read().strip()}")
            yield
        finally:
            line.terminate()


def _launch(network: HostNetwork, work: str, given: Mapping[str, Any]) -> list[str]:
    """The command that runs a function of this package on every host's ranks, from the first."""
    wanted = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("ASYNCDDP_", "OMPI_MCA_"))
    }
    wanted |= {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", _YIELD: "1"}
    wanted["PATH"] = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    numbers = range(1, network.hosts + 1)
    names = ",".join(f"h{number}:{network.ranks_per_host}" for number in numbers)
    launch = [sys.executable, "-m", "asyncddp", "run", "-H", names]
    launch += ["--remote-shell", str(_SCRIPT), "--network-interface", _NETWORK]
    launch += ["--timeout", str(_LIMIT), "-x", _YIELD, *rank_program(work, given)]
    words = shlex.join(["env", *(f"{name}={value}" for name, value in wanted.items()), *launch])
    return [str(_SCRIPT), "h1", f"cd / && exec {words}"]


def run_on_hosts(
    network: HostNetwork, work: str, given: Mapping[str, Any], advance: Advance = lambda line: None
) -> dict[str, Any]:
    """Make hosts, run a function of this package with ranks on each, and take them down.

    Args:
        network: The hosts.
        work: ``module:function``, the module named after ``benchmarks.``.
        given: The function's arguments.
        advance: Told each line that its first rank prints.

    Returns:
        What the function gave on rank 0.

    Raises:
        RunFailedError: Hosts cannot be made, or the run failed.
    """
    with hosts(network):
        return run_for_json(_launch(network, work, given), advance)


# on the hosts


def wait_until_quiet(world: RankGroup) -> None:
    """Wait until nothing is under way between the ranks any more, and leave the cores alone."""
    for _ in range(2):
        gathered = world.comm.Ibarrier()
        while not gathered.Test():
            time.sleep(0.0005)
    time.sleep(0.05)


def transmitted(interface: str) -> int:
    """Bytes that this host has sent through an interface, since it was made."""
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    return int(counter.read_text(encoding="ascii"))
