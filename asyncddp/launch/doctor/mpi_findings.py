"""The launcher, and what the MPI library behind mpi4py says of itself in a child process."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncddp.errors import EnvironmentProblem
from asyncddp.launch.doctor.finding import Finding
from asyncddp.launch.locate import Found, locate

__all__ = ["cuda_awareness", "find_launcher", "launcher_finding", "library_findings"]

_FAMILIES = {
    "open_mpi_4": "Open MPI",
    "open_mpi_5": "Open MPI",
    "mpich": "MPICH",
    "intel_mpi": "Intel MPI",
}


def find_launcher(
    wanted: str | None, environment: Mapping[str, str]
) -> tuple[Found | None, Finding]:
    """The launcher, if there is one, and what to say of it."""
    try:
        found = locate(wanted, environment)
    except EnvironmentProblem as problem:
        return None, Finding("MPI", "launcher", "missing", str(problem), "bad")
    return found, launcher_finding(found)


def launcher_finding(found: Found) -> Finding:
    """What to say of a launcher."""
    value = f"{found.launcher.title} {found.version} ({found.executable})"
    return Finding("MPI", "launcher", value)


def library_findings(
    facts: Mapping[str, Any], found: Found | None, has_gpus: bool
) -> list[Finding]:
    """What to say of the MPI library.

    Args:
        facts: What the child process said: ``library``, ``vendor``, ``thread_level``, ``ulfm``,
            ``cuda_aware``, or ``problem``.
        found: The launcher.
        has_gpus: Whether CUDA awareness matters.
    """
    if "problem" in facts:
        return [Finding("MPI", "library", "cannot be used", str(facts["problem"]), "bad")]
    items = [_library(facts, found), _threads(str(facts.get("thread_level", "unknown")))]
    return [*items, *_abilities(facts, has_gpus)]


def cuda_awareness(launcher: str) -> bool | None:
    """Whether the MPI library takes GPU memory, by Open MPI's own tool; None if nobody can say."""
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


def _library(facts: Mapping[str, Any], found: Found | None) -> Finding:
    value, vendor = str(facts.get("library", "unknown")), str(facts.get("vendor", ""))
    value = value.partition(",")[0]
    family = _FAMILIES.get(found.vendor) if found is not None else None
    if found is not None and family is not None and vendor and vendor != family:
        advice = (
            f"The launcher is {family}'s, the library {vendor}'s: every rank would believe that it "
            f"is alone. Use {vendor}'s mpirun (--launcher), or set MPI4PY_LIBMPI to {family}'s "
            "libmpi.so."
        )
        return Finding("MPI", "library", value, advice, "bad")
    return Finding("MPI", "library", value)


def _threads(level: str) -> Finding:
    if level == "MPI_THREAD_MULTIPLE":
        return Finding("MPI", "thread level", level)
    advice = "Communication overlaps less with computing; MPI_THREAD_MULTIPLE would be better."
    return Finding("MPI", "thread level", level, advice, "note")


def _abilities(facts: Mapping[str, Any], has_gpus: bool) -> Iterable[Finding]:
    aware = facts.get("cuda_aware")
    words = {True: "yes", False: "no", None: "unknown"}[aware]
    advice = ""
    if has_gpus and aware is False:
        advice = (
            "Tensors on GPUs travel through host memory. ./set_conda_down.sh makes an environment "
            "with a CUDA-aware Open MPI; NCCL, through cupy, does without."
        )
    yield Finding("MPI", "CUDA awareness", words, advice, "note" if advice else "good")
    yield Finding("MPI", "ULFM", "yes" if facts.get("ulfm") else "no (Open MPI 5 has it)")
