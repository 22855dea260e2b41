"""Requirements of ``nccl``: detection of cupy and NCCL, and the conditions on two ranks' GPUs."""

from __future__ import annotations

from dataclasses import replace

from asyncddp.install_commands import install_command
from asyncddp.transport.cuda.capabilities import DeviceCapabilities, ranks_without, unknown_gpu
from asyncddp.transport.cuda.nccl.cupy_bindings import describe_conflict, versions

_MIN_VERSION = 20700  # send and recv came with 2.7


def detect_libraries(facts: DeviceCapabilities) -> DeviceCapabilities:
    """Add the versions of cupy and NCCL, and the conflict of NCCL libraries, to a rank's facts."""
    cupy, nccl = versions()
    return replace(facts, cupy=cupy, nccl=nccl, doubt=describe_conflict(nccl))


def find_conflict(facts: DeviceCapabilities) -> str:
    """Return the conflict of NCCL libraries that a rank has found; empty where there is none."""
    return facts.doubt


def find_obstacle(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
    """Return why NCCL cannot be used between two ranks; None where it can."""
    if where := ranks_without(lambda facts: facts.cupy is not None, one, other):
        return f"{where} cannot import cupy: {install_command('cuda12', 'cuda13')}"
    if where := ranks_without(lambda facts: (facts.nccl or 0) >= _MIN_VERSION, one, other):
        return f"cupy finds no NCCL of at least 2.7 at {where}"
    if one.nccl != other.nccl:
        return f"rank {one.rank} has NCCL {one.nccl}, rank {other.rank} has {other.nccl}"
    if one.gpu == other.gpu != "":
        return f"rank {one.rank} and rank {other.rank} share one GPU, which NCCL refuses"
    return unknown_gpu(one, other)
