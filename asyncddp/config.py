"""Configuration from the ``ASYNCDDP_*`` environment variables, read once into a dataclass."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from asyncddp.errors import ArgumentError

T = TypeVar("T")
HARDWARE_QUEUES = 32
"""Queues between the host and a GPU that CUDA can open; each holds the work of several streams."""
_OPEN_MPI = {
    # Else a tensor is sent in one piece over TCP, and later messages to the peer wait behind it.
    "OMPI_MCA_btl_tcp_rdma_pipeline_frag_size": "65536",
    # So many of these may be on their way: more than the default's 3, each of 64 KB, on long links.
    "OMPI_MCA_pml_ob1_send_pipeline_depth": "64",
    "OMPI_MCA_pml_ob1_recv_pipeline_depth": "64",
}
"""Settings of one process. What must be the same on all ranks is no variable, since a rank may have
started MPI before it reads them: see :mod:`asyncddp.transport.mpi.iallreduce_tuning`."""


def read_variable(
    name: str, parse: Callable[[str], T], environ: Mapping[str, str] | None = None
) -> T | None:
    """Read an environment variable; None if it is not set.

    ``parse`` raises a ValueError that says which values are expected.

    Raises:
        ArgumentError: The value cannot be read; the message names the variable.

    Example:
        >>> read_variable("ASYNCDDP_STEPS", whole_number(1), {"ASYNCDDP_STEPS": "5"})
        5
    """
    text = (os.environ if environ is None else environ).get(name)
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        message = f"environment variable {name}: expected {error}, got {text!r}"
        raise ArgumentError(message) from error


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process, except for those already set."""
    os.environ.update({name: text for name, text in variables.items() if name not in os.environ})


@contextlib.contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside a ``with`` block, and restore them afterwards."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def tune_open_mpi(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set defaults for Open MPI's TCP options; effective only before MPI starts.

    Example:
        >>> environ = {"OMPI_MCA_pml_ob1_send_pipeline_depth": "3"}
        >>> tune_open_mpi(environ)
        >>> environ["OMPI_MCA_pml_ob1_send_pipeline_depth"]
        '3'
    """
    for name, value in _OPEN_MPI.items():
        environ.setdefault(name, value)


def tune_cuda(transports: str | None, environ: MutableMapping[str, str] = os.environ) -> None:
    """Make CUDA use one hardware queue per stream, if NCCL may carry messages between GPUs.

    Effective only before CUDA starts, which a CUDA-aware MPI has it do as it starts itself. What is
    set stays. ``transports`` are those of ``ASYNCDDP_DEVICE_TRANSPORTS``.

    Example:
        >>> environ = {}
        >>> tune_cuda("cuda_ipc", environ)
        >>> tune_cuda(None, environ)
        >>> environ
        {'CUDA_DEVICE_MAX_CONNECTIONS': '32'}
    """
    if {"auto", "nccl"} & {name.strip() for name in (transports or "auto").split(",")}:
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(HARDWARE_QUEUES))


def keepalive_times(seconds: float) -> tuple[int, int, int]:
    """Return the TCP keepalive settings: idle seconds, probe interval, number of probes.

    Example:
        >>> keepalive_times(30.0)
        (10, 5, 3)
    """
    return max(1, int(seconds / 3)), max(1, int(seconds / 6)), 3


def open_mpi_keepalive(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make Open MPI's launcher detect a lost host in time.

    Example:
        >>> open_mpi_keepalive({})["PRTE_MCA_oob_tcp_keepalive_time"]
        '10'
    """
    times = keepalive_times(Config.from_environment(environ).network_timeout)
    wanted = {
        f"{prefix}_MCA_oob_tcp_keepalive_{name}": str(value)
        for prefix in ("PRTE", "OMPI")
        for name, value in zip(("time", "intvl", "probes"), times, strict=True)
    }
    return {name: value for name, value in wanted.items() if name not in environ}


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise ValueError("a number above zero")


def whole_number(least: int) -> Callable[[str], int]:
    """Return a parser of integers with a lower bound, for :func:`read_variable`."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if int(text) >= least:
                return int(text)
        raise ValueError(f"a whole number of at least {least}")

    return parse


def _flag(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True}
    known |= {"0": False, "false": False, "no": False, "off": False, "": False}
    if text.lower() not in known:
        raise ValueError("one of 0, 1, true, false, yes, no, on, off")
    return known[text.lower()]


def _text(text: str) -> str | None:
    return text or None


def _env(
    name: str, parse: Callable[[str], Any], default: Any, *, was: str = "", **more: Any
) -> Any:
    return field(default=default, metadata={"name": name, "parse": parse, "was": was}, **more)


@dataclass(frozen=True)
class Config:
    """Settings of one rank, from environment variables and the arguments of ``init()``.

    Attributes:
        timeout: ``ASYNCDDP_TIMEOUT``: seconds without progress after which a wait raises.
        warn_after: ``ASYNCDDP_WARN_AFTER``: seconds after which a wait warns once.
        network_timeout: ``ASYNCDDP_NETWORK_TIMEOUT``: seconds after which a machine that answers
            nothing is lost.
        check: ``ASYNCDDP_CHECK``: confirm every exchange with the peers before it completes.
        elastic: ``ASYNCDDP_ELASTIC``: the other ranks go on where a rank dies.
        replaces: ``ASYNCDDP_REPLACES``: this process takes the place of a rank that has died; set
            by ``asyncddp run --elastic --restarts``.
        transport: ``ASYNCDDP_TRANSPORT``: name of the transport to use instead of the default.
        device_transports: ``ASYNCDDP_DEVICE_TRANSPORTS``: transports that may carry tensors on
            GPUs, the preferred one first, separated by commas, or ``auto``; default ``cuda_ipc``
            where ranks can read each other's memory, ``nccl`` between machines and for sums where
            cupy is installed, and ``cuda_staged`` elsewhere.
        ranks_per_machine: ``ASYNCDDP_RANKS_PER_MACHINE``: simulate machines of so many ranks.
        report_dir: ``ASYNCDDP_REPORT_DIR``: folder in which a failing rank writes its report;
            set by ``asyncddp run``.
        timeline: ``ASYNCDDP_TIMELINE``: folder or prefix of the files to which ranks write their
            timelines; none are written if empty.
        nvtx: ``ASYNCDDP_NVTX``: show the timeline's names in NVIDIA's tools, where there is CUDA.
        secret: ``ASYNCDDP_SECRET``: by which ranks without MPI prove to each other that they are of
            one run; ``asyncddp run`` makes one, others none.
    """

    timeout: float = _env("ASYNCDDP_TIMEOUT", _positive, 600.0)
    warn_after: float = _env("ASYNCDDP_WARN_AFTER", _positive, 60.0)
    network_timeout: float = _env("ASYNCDDP_NETWORK_TIMEOUT", _positive, 30.0)
    check: bool = _env("ASYNCDDP_CHECK", _flag, False)
    elastic: bool = _env("ASYNCDDP_ELASTIC", _flag, False)
    replaces: bool = _env("ASYNCDDP_REPLACES", _flag, False)
    transport: str | None = _env("ASYNCDDP_TRANSPORT", str, None)
    device_transports: str | None = _env(
        "ASYNCDDP_DEVICE_TRANSPORTS", _text, None, was="ASYNCDDP_DEVICE_WIRES"
    )
    ranks_per_machine: int | None = _env("ASYNCDDP_RANKS_PER_MACHINE", whole_number(1), None)
    report_dir: str | None = _env("ASYNCDDP_REPORT_DIR", str, None)
    timeline: str | None = _env("ASYNCDDP_TIMELINE", _text, None)
    nvtx: bool = _env("ASYNCDDP_NVTX", _flag, False)
    secret: str | None = _env("ASYNCDDP_SECRET", _text, None, repr=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Config:
        """Read the settings from environment variables; given arguments take precedence.

        Raises:
            ArgumentError: A variable has a value that cannot be read; the message names it.

        Example:
            >>> Config.from_environment({"ASYNCDDP_TIMEOUT": "5"}, check=True).timeout
            5.0
        """
        environ = os.environ if environ is None else environ
        values = {
            key: os.fspath(value) if isinstance(value, os.PathLike) else value
            for key, value in given.items()
            if value is not None
        }
        for item in fields(cls):
            name, parse, was = (item.metadata[key] for key in ("name", "parse", "was"))
            if was in environ and name not in environ:
                warnings.warn(f"the variable {was} is called {name} now", FutureWarning, 2)
                name = was
            if item.name not in values and name in environ:
                values[item.name] = read_variable(name, parse, environ)
        return cls(**values)
