"""Hosts simulated by network namespaces with limited links, by ``scripts/testhosts``."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from benchmarks.network.host_network import HostNetwork
from benchmarks.subprocess_runs import RunFailedError, python_path

__all__ = ["command", "hosts", "refusal"]

_SCRIPT = Path(__file__).parents[2] / "testhosts"
_DELAY_LINE = Path(__file__).with_name("delay_line.py")
_LINK = "asyncddp-v"  # of each link's end outside its host, as the script names them
_NETWORK = "10.77.0.0/24"
_RESTART = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
_LIMIT = 1800  # seconds for a run
_YIELD = "OMPI_MCA_mpi_yield_when_idle"  # the hosts share few cores, and do not know it


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(_SCRIPT), *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, start_new_session=True
    )


def refusal() -> str | None:
    """Why no hosts can be made here now, in a sentence; None where they can."""
    can = _call("check")
    if can.returncode != 0:
        return f"no hosts can be made here: {can.stderr.strip()}"
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    if "asyncddp-h" in listed.stdout:
        return (
            "there are hosts already, which somebody may be using; once nobody is, take them down "
            "with scripts/testhosts down"
        )
    return None


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
        if network.keeps_window:
            _keep_window(count)
        with _delayed(count, network.latency) if network.latency else nullcontext():
            yield
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop this
        _call("down")
        signal.signal(signal.SIGINT, before)


def _slow_down(number: int, rate: str) -> None:
    """Limit what a host sends, and at the other end of its link what it receives."""
    limit = f"root tbf rate {rate} burst 64kb latency 50ms".split()
    for end in (
        ["-n", f"asyncddp-h{number}", "qdisc", "replace", "dev", "e0"],
        ["qdisc", "replace", "dev", f"{_LINK}{number}"],
    ):
        words = ["tc", *end, *limit]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RunFailedError(f"the link of h{number} stays as it is: {done.stderr.strip()}")


def _keep_window(count: int) -> None:
    """Let TCP go on after a pause as it was."""
    for number in range(1, count + 1):
        words = ["ip", "netns", "exec", f"asyncddp-h{number}", "tee", _RESTART]
        done = subprocess.run(words, input="0", capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RunFailedError(f"TCP of h{number} stays as it is: {done.stderr.strip()}")


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


def command(count: int, ranks: int, module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package with ranks on every host, from the first."""
    wanted = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("ASYNCDDP_", "OMPI_MCA_"))
    }
    wanted |= {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", _YIELD: "1"}
    wanted["PATH"] = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    names = ",".join(f"h{number}:{ranks}" for number in range(1, count + 1))
    launch = [sys.executable, "-m", "asyncddp", "run", "-H", names]
    launch += ["--remote-shell", str(_SCRIPT), "--network-interface", _NETWORK]
    launch += ["--timeout", str(_LIMIT), "-x", _YIELD, "-m", f"benchmarks.{module}", *arguments]
    words = shlex.join(["env", *(f"{name}={value}" for name, value in wanted.items()), *launch])
    return [str(_SCRIPT), "h1", f"cd / && exec {words}"]
