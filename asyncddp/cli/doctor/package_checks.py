"""Checks of installed Python packages, read from their metadata without importing them."""

from __future__ import annotations

import contextlib
import platform
import re
import runpy
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, version

from asyncddp.cli.doctor.check_result import CheckResult
from asyncddp.install_commands import install_command

_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_OPTIONAL = {
    "mpi4py": ("MPI", "mpi4py"),
    "scipy": ("analysing large graphs", "sparse"),
    "matplotlib": ("pictures", "plot"),
}


def _find_installed(names: Iterable[str]) -> str | None:
    """Return ``name version`` of the first installed package among the given names."""
    for name in names:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None


def torch_cuda_version() -> str | None:
    """Read torch's CUDA version from its ``version.py``; None for a CPU build."""
    with contextlib.suppress(PackageNotFoundError, OSError):
        path = distribution("torch").locate_file("torch/version.py")
        cuda = runpy.run_path(str(path)).get("cuda")
        return None if cuda is None else str(cuda)
    return None


def _check_torch(has_gpus: bool) -> CheckResult:
    name = _find_installed(["torch"])
    if name is None:
        return CheckResult("Python", "torch", "missing", install_command("torch"), "bad")
    cuda = torch_cuda_version()
    value = f"{name.split()[1]}, " + ("CPU build" if cuda is None else f"for CUDA {cuda}")
    advice = "This torch cannot use the GPUs: install its CUDA build (see pytorch.org)."
    return CheckResult("Python", "torch", value, advice * (cuda is None and has_gpus))


def _check_gpu_packages() -> Iterable[CheckResult]:
    major = (torch_cuda_version() or "13").partition(".")[0]
    yield _check_nccl(major)
    cupy = _find_installed(_CUPY)
    known = major in ("12", "13")
    install = install_command(f"cuda{major}") if known else f"install the cupy for CUDA {major}"
    built = re.match(r"cupy-cuda(\d+)x", cupy or "")
    advice = "" if cupy else f"NCCL is reached through cupy: {install}"
    if built is not None and built[1] != major:
        advice = f"It is for CUDA {built[1]}, and torch for CUDA {major}: remove it, then {install}"
    yield CheckResult("GPU", "cupy", cupy or "missing", advice)


def _check_nccl(major: str) -> CheckResult:
    """Check the NCCL wheel; wheels for two CUDA versions overwrite each other's files."""
    found = [one for name in _NCCL if (one := _find_installed([name])) is not None]
    advice = ""
    if len(found) > 1:
        advice = (
            f"Both hold nvidia/nccl/lib/libnccl.so.2, and which one is there is chance: pip "
            f"uninstall {' '.join(_NCCL)}, then install torch again."
        )
    elif found and not (name := found[0].split()[0]).endswith(major):
        advice = f"Torch is for CUDA {major}: pip uninstall {name}, then torch again."
    value = " and ".join(found) or "no package; a system's libnccl may serve"
    return CheckResult("GPU", "NCCL", value, advice)


def check_packages(has_gpus: bool) -> list[CheckResult]:
    """Check Python, torch, mpi4py and the optional packages."""
    found = [CheckResult("Python", "Python", platform.python_version()), _check_torch(has_gpus)]
    for name, (use, extra) in _OPTIONAL.items():
        value = (_find_installed([name]) or f"{name} missing").split()[1]
        advice = f"For {use}: {install_command(extra)}" if value == "missing" else ""
        found.append(CheckResult("Python", name, value, advice))
    return [*found, *(_check_gpu_packages() if has_gpus else ())]
