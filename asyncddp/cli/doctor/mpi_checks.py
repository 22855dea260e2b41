"""Checks by ``asyncddp doctor`` of the MPI launcher, and of the MPI library that mpi4py loads."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncddp.cli.doctor.check_result import CheckResult
from asyncddp.errors import EnvironmentProblem
from asyncddp.launch.launcher_discovery import InstalledLauncher, find_launcher

_FAMILIES = {
    "open_mpi_4": "Open MPI",
    "open_mpi_5": "Open MPI",
    "mpich": "MPICH",
    "intel_mpi": "Intel MPI",
}


def check_launcher(
    wanted: str | None, environment: Mapping[str, str]
) -> tuple[InstalledLauncher | None, CheckResult]:
    """Find the launcher, and return it with a check result."""
    try:
        found = find_launcher(wanted, environment)
    except EnvironmentProblem as problem:
        return None, CheckResult("MPI", "launcher", "missing", str(problem), "bad")
    return found, describe_launcher(found)


def describe_launcher(found: InstalledLauncher) -> CheckResult:
    """Return the check result of a launcher that was found."""
    value = f"{found.launcher.title} {found.version} ({found.executable})"
    return CheckResult("MPI", "launcher", value)


def check_mpi_library(
    facts: Mapping[str, Any], found: InstalledLauncher | None, has_gpus: bool
) -> list[CheckResult]:
    """Check the MPI library: version, thread level, CUDA awareness and ULFM.

    Args:
        facts: Answer of the child process: ``library``, ``family``, ``thread_level``, ``ulfm``,
            ``cuda_aware``, or ``problem``.
        found: The launcher.
        has_gpus: Whether there are GPUs, so that CUDA awareness matters.
    """
    if "problem" in facts:
        return [CheckResult("MPI", "library", "cannot be used", str(facts["problem"]), "bad")]
    items = [
        _check_library(facts, found),
        _check_thread_level(str(facts.get("thread_level", "unknown"))),
    ]
    return [*items, *_check_features(facts, has_gpus)]


def query_cuda_awareness(launcher: str) -> bool | None:
    """Query ``ompi_info`` for CUDA support of Open MPI; None if unknown."""
    try:
        answer = subprocess.run(
            [str(Path(launcher).with_name("ompi_info")), "--parsable", "--all"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"mpi_built_with_cuda_support:value:(true|false)", answer.stdout)
    return None if match is None else match[1] == "true"


def _check_library(facts: Mapping[str, Any], found: InstalledLauncher | None) -> CheckResult:
    value, vendor = str(facts.get("library", "unknown")), str(facts.get("vendor", ""))
    value = value.partition(",")[0]
    family = _FAMILIES.get(found.family) if found is not None else None
    if found is not None and family is not None and vendor and vendor != family:
        advice = (
            f"The launcher is {family}'s, the library {vendor}'s: every rank would believe that it "
            f"is alone. Use {vendor}'s mpirun (--launcher), or set MPI4PY_LIBMPI to {family}'s "
            "libmpi.so."
        )
        return CheckResult("MPI", "library", value, advice, "bad")
    return CheckResult("MPI", "library", value)


def _check_thread_level(level: str) -> CheckResult:
    if level == "MPI_THREAD_MULTIPLE":
        return CheckResult("MPI", "thread level", level)
    advice = "Communication overlaps less with computing; MPI_THREAD_MULTIPLE would be better."
    return CheckResult("MPI", "thread level", level, advice, "note")


def _check_features(facts: Mapping[str, Any], has_gpus: bool) -> Iterable[CheckResult]:
    aware = facts.get("cuda_aware")
    words = {True: "yes", False: "no", None: "unknown"}[aware]
    advice = ""
    if has_gpus and aware is False:
        advice = (
            "Tensors on GPUs travel through host memory. ./set_conda_down.sh makes an environment "
            "with a CUDA-aware Open MPI; NCCL, through cupy, does without."
        )
    yield CheckResult("MPI", "CUDA awareness", words, advice, "note" if advice else "good")
    yield CheckResult("MPI", "ULFM", "yes" if facts.get("ulfm") else "no (Open MPI 5 has it)")
