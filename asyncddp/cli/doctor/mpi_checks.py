"""MPI checks of ``asyncddp doctor``: the launcher, and the MPI library that mpi4py loads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from asyncddp.cli.doctor.check_result import CheckResult
from asyncddp.cli.doctor.machine_checks import output_of
from asyncddp.config import read_variable
from asyncddp.errors import EnvironmentProblem
from asyncddp.launch.launcher_discovery import INSTALL_MPI, InstalledLauncher, find_launcher
from asyncddp.launch.launchers.local import LOCAL

_WITH_LIBRARY = ("Open MPI", "MPICH", "Intel MPI")  # launchers that belong to an MPI library


def check_launcher(
    wanted: str | None, environment: Mapping[str, str]
) -> tuple[InstalledLauncher | None, CheckResult]:
    """Find the launcher, and return it with a check result."""
    try:
        found = find_launcher(wanted, environment)
    except EnvironmentProblem as problem:
        return None, CheckResult("MPI", "launcher", "missing", str(problem), "bad")
    if found.launcher is LOCAL:
        advice = f"asyncddp run starts ranks of this machine alone. For several: {INSTALL_MPI}"
        return found, CheckResult("MPI", "launcher", "none, torchrun will do", advice)
    value = f"{found.launcher.title} {found.version} ({found.executable})"
    return found, CheckResult("MPI", "launcher", value)


def check_mpi_library(
    facts: Mapping[str, Any], found: InstalledLauncher | None, has_gpus: bool
) -> list[CheckResult]:
    """Check the MPI library by the probe's ``facts``, which may be only a ``problem``."""
    if "problem" in facts:
        needed = found is None or found.launcher is not LOCAL
        level: Literal["note", "bad"] = "bad" if needed else "note"
        return [CheckResult("MPI", "library", "cannot be used", str(facts["problem"]), level)]
    threads, best = str(facts.get("thread_level", "unknown")), "MPI_THREAD_MULTIPLE"
    advice = f"Communication overlaps less with computing; {best} would be better."
    return [
        _check_library(facts, found),
        CheckResult("MPI", "thread level", threads, advice * (threads != best)),
        *_check_features(facts, has_gpus),
    ]


def check_torch_launchers(answer: Mapping[str, Any]) -> CheckResult:
    """Check the transport for ranks started by torchrun, from the probe's answer."""
    announced, problem = answer.get("announced", ""), answer.get("c10d_problem", "")
    if problem:
        return CheckResult("torchrun", "c10d", "cannot be used", str(problem), "bad")
    if not announced:
        return CheckResult("torchrun", "c10d", "in use where ranks are started without MPI")
    advice = (
        "Between machines whoever reaches torch's store may join as a rank: set ASYNCDDP_SECRET, "
        "alike for all ranks."
    )
    advice *= not read_variable("ASYNCDDP_SECRET", str)
    return CheckResult("torchrun", "c10d", f"in use here: {announced}", advice)


def query_cuda_awareness(launcher: str) -> bool | None:
    """Query ``ompi_info`` for CUDA support of Open MPI; None if unknown."""
    answer = output_of(str(Path(launcher).with_name("ompi_info")), "--parsable", "--all")
    match = re.search(r"mpi_built_with_cuda_support:value:(true|false)", answer)
    return None if match is None else match[1] == "true"


def _check_library(facts: Mapping[str, Any], found: InstalledLauncher | None) -> CheckResult:
    value = str(facts.get("library", "unknown")).partition(",")[0]
    vendor = str(facts.get("vendor", ""))
    family = vendor if found is None else found.launcher.title
    if not vendor or vendor == family or family not in _WITH_LIBRARY:
        return CheckResult("MPI", "library", value)
    advice = (
        f"The launcher is {family}'s, the library {vendor}'s: every rank would believe that it is "
        f"alone. Use {vendor}'s mpirun (--launcher), or set MPI4PY_LIBMPI to {family}'s libmpi.so."
    )
    return CheckResult("MPI", "library", value, advice, "bad")


def _check_features(facts: Mapping[str, Any], has_gpus: bool) -> Iterable[CheckResult]:
    aware = facts.get("cuda_aware")
    words = {True: "yes", False: "no", None: "unknown"}[aware]
    advice = (
        "Tensors on GPUs travel through host memory. ./set_conda_down.sh makes an environment "
        "with a CUDA-aware Open MPI; NCCL, through cupy, does without."
    )
    advice *= has_gpus and aware is False
    yield CheckResult("MPI", "CUDA awareness", words, advice)
    yield CheckResult("MPI", "ULFM", "yes" if facts.get("ulfm") else "no (Open MPI 5 has it)")
