"""Machine checks of ``asyncddp doctor``: CPU cores, memory, file limit, GPUs, batch system."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncddp.cli.doctor.check_result import CheckResult
from asyncddp.launch.machine_limits import cores
from asyncddp.rank_list_text import list_ranks

_SHM = Path("/dev/shm")
_SMALL_SHM = 1 << 30
_FEW_FILES = 4096
_RESTART = "net.ipv4.tcp_slow_start_after_idle"
_SMI = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def _format_size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _check_shared_memory() -> CheckResult:
    if not _SHM.is_dir():
        return CheckResult("Machine", "/dev/shm", "not there")
    usage = shutil.disk_usage(_SHM)
    value = f"{_format_size(usage.total)}, {_format_size(usage.free)} free"
    advice = "Give the container more: docker run --shm-size=8g, or --ipc=host."
    return CheckResult("Machine", "/dev/shm", value, advice * (usage.total < _SMALL_SHM))


def _check_open_files() -> CheckResult:
    unlimited = resource.RLIM_INFINITY
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == unlimited else limit for limit in limits)
    value = "unlimited" if soft == math.inf else str(soft)
    advice = f"Many ranks with data-loading workers need more: ulimit -n {min(hard, 65536)}"
    return CheckResult("Machine", "open files", value, advice * (soft < _FEW_FILES))


def _check_tcp() -> list[CheckResult]:
    try:
        restarts = Path("/proc/sys", *_RESTART.split(".")).read_text().strip() != "0"
    except OSError:
        return []  # another system, or a container that hides it
    value = f"{_RESTART}={restarts:d}"
    if restarts:
        value += "; far machines: 0, so that TCP does not begin slowly again after a pause"
    return [CheckResult("Machine", "TCP", value)]


def output_of(program: str | None, *arguments: str) -> str:
    """Return the output of a program; empty if it is missing or fails."""
    if program is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.check_output(
                [program, *arguments], stderr=subprocess.DEVNULL, text=True, timeout=20
            )
    return ""


def list_gpus() -> list[str]:
    """List name, memory and driver of each NVIDIA GPU, as printed by nvidia-smi."""
    return output_of(shutil.which("nvidia-smi"), *_SMI).strip().splitlines()


def _check_gpus(found: list[str]) -> Iterable[CheckResult]:
    if not found:
        yield CheckResult("GPU", "GPUs", "none (nvidia-smi shows none); training runs on CPUs")
    for number, line in enumerate(found):
        name, memory, driver = (part.strip() for part in f"{line},,".split(",")[:3])
        yield CheckResult("GPU", f"GPU {number}", f"{name}, {memory}, driver {driver}")


def check_mixed_devices(ranks: Sequence[Mapping[str, Any]]) -> list[CheckResult]:
    """Return a warning if some ranks see GPUs and others see none."""
    without = [one["rank"] for one in ranks if "cuda" not in one["devices"]]
    if not without or len(without) == len(ranks):
        return []
    advice = (
        "Tensors of all ranks must lie on one kind of device. Start ranks only where there are "
        "GPUs, or hide them with CUDA_VISIBLE_DEVICES= on all ranks."
    )
    value = f"none for {list_ranks(without)}, some for the others"
    return [CheckResult("GPU", "GPUs of the ranks", value, advice)]


def check_machine(environment: Mapping[str, str], found_gpus: list[str]) -> list[CheckResult]:
    """Run all checks of the machine."""
    value = f"{cores()} usable ({os.cpu_count() or 1} logical processors)"
    found = [CheckResult("Machine", "cores", value), _check_shared_memory(), _check_open_files()]
    found += _check_tcp()
    if "SLURM_JOB_ID" in environment:
        nodes = environment.get("SLURM_JOB_NUM_NODES", "?")
        value = f"in job {environment['SLURM_JOB_ID']} on {nodes} node(s)"
        found.append(CheckResult("Machine", "Slurm", value))
    return [*found, *_check_gpus(found_gpus)]
