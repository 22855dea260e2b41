"""Cores, shared memory, limits, GPUs and the batch system, from the operating system alone."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncddp.launch.doctor.finding import Finding
from asyncddp.launch.machine import cores
from asyncddp.rank_lists import list_ranks

__all__ = ["gpus", "machine_findings", "mixed_devices"]

_SHM = Path("/dev/shm")
_SMALL_SHM = 1 << 30
_FEW_FILES = 4096
_SMI = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _cores() -> Finding:
    logical = os.cpu_count() or 1
    return Finding("Machine", "cores", f"{cores()} usable ({logical} logical processors)")


def _shared_memory() -> Finding:
    if not _SHM.is_dir():
        return Finding("Machine", "/dev/shm", "not there")
    usage = shutil.disk_usage(_SHM)
    value = f"{_size(usage.total)}, {_size(usage.free)} free"
    if usage.total < _SMALL_SHM:
        advice = "Give the container more: docker run --shm-size=8g, or --ipc=host."
        return Finding("Machine", "/dev/shm", value, advice, "note")
    return Finding("Machine", "/dev/shm", value)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    value = "unlimited" if soft == unlimited else str(soft)
    if soft != unlimited and soft < _FEW_FILES:
        most = 65536 if hard == unlimited else min(hard, 65536)
        advice = f"Many ranks with data-loading workers need more: ulimit -n {most}"
        return Finding("Machine", "open files", value, advice, "note")
    return Finding("Machine", "open files", value)


def _batch_system(environment: Mapping[str, str]) -> Iterable[Finding]:
    if "SLURM_JOB_ID" in environment:
        nodes = environment.get("SLURM_JOB_NUM_NODES", "?")
        value = f"in job {environment['SLURM_JOB_ID']} on {nodes} node(s)"
        yield Finding("Machine", "Slurm", value)


def gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU; empty where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        answer = subprocess.run(
            [program, *_SMI], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.strip().splitlines() if answer.returncode == 0 else []


def _gpu_findings(found: list[str]) -> Iterable[Finding]:
    if not found:
        yield Finding("GPU", "GPUs", "none (nvidia-smi shows none); training runs on CPUs")
    for number, line in enumerate(found):
        name, memory, driver = (part.strip() for part in f"{line},,".split(",")[:3])
        yield Finding("GPU", f"GPU {number}", f"{name}, {memory}, driver {driver}")


def mixed_devices(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """A warning where some ranks see GPUs and others see none.

    Args:
        ranks: What each rank says: ``rank`` and ``devices``.
    """
    without = [one["rank"] for one in ranks if "cuda" not in one["devices"]]
    if not without or len(without) == len(ranks):
        return []
    advice = (
        "Tensors of all ranks must lie on one kind of device. Start ranks only where there are "
        "GPUs, or hide them with CUDA_VISIBLE_DEVICES= on all ranks."
    )
    value = f"none for {list_ranks(without)}, some for the others"
    return [Finding("GPU", "GPUs of the ranks", value, advice, "note")]


def machine_findings(environment: Mapping[str, str], found_gpus: list[str]) -> list[Finding]:
    """Everything about the machine itself."""
    machine = [_cores(), _shared_memory(), _open_files(), *_batch_system(environment)]
    return [*machine, *_gpu_findings(found_gpus)]
