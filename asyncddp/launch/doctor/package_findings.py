"""Which Python packages are there, read from their metadata: none of them is imported."""

from __future__ import annotations

import platform
import re
import runpy
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, version

from asyncddp.launch.doctor.finding import Finding
from asyncddp.packages import install_command

__all__ = ["package_findings", "torch_cuda"]

_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_OPTIONAL = {
    "scipy": ("analysing large graphs", "sparse"),
    "matplotlib": ("pictures", "plot"),
}


def _installed(names: Iterable[str]) -> str | None:
    """``name version`` of the first that is there."""
    for name in names:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None


def torch_cuda() -> str | None:
    """CUDA version that torch is built for, read from its ``version.py``; None for a CPU build."""
    try:
        path = distribution("torch").locate_file("torch/version.py")
        values = runpy.run_path(str(path))
    except (PackageNotFoundError, OSError):
        return None
    cuda = values.get("cuda")
    return None if cuda is None else str(cuda)


def _torch(has_gpus: bool) -> Finding:
    name = _installed(["torch"])
    if name is None:
        return Finding("Python", "torch", "missing", install_command("torch"), "bad")
    cuda = torch_cuda()
    value = f"{name.split()[1]}, " + ("CPU build" if cuda is None else f"for CUDA {cuda}")
    if cuda is None and has_gpus:
        advice = "This torch cannot use the GPUs: install its CUDA build (see pytorch.org)."
        return Finding("Python", "torch", value, advice, "note")
    return Finding("Python", "torch", value)


def _gpu_packages() -> Iterable[Finding]:
    """What only a machine with GPUs needs."""
    major = (torch_cuda() or "13").partition(".")[0]
    yield _nccl(major)
    cupy = _installed(_CUPY)
    known = major in ("12", "13")
    install = install_command(f"cuda{major}") if known else f"install the cupy for CUDA {major}"
    if cupy is None:
        advice = f"NCCL is reached through cupy: {install}"
        yield Finding("GPU", "cupy", "missing", advice, "note")
        return
    built = re.match(r"cupy-cuda(\d+)x", cupy)
    if built is not None and built[1] != major:
        advice = f"It is for CUDA {built[1]}, and torch for CUDA {major}: remove it, then {install}"
        yield Finding("GPU", "cupy", cupy, advice, "note")
        return
    yield Finding("GPU", "cupy", cupy)


def _nccl(major: str) -> Finding:
    """NCCL's wheels, which come with torch's; those of two CUDA versions are one file."""
    found = [one for name in _NCCL if (one := _installed([name])) is not None]
    if len(found) > 1:
        advice = (
            f"Both hold nvidia/nccl/lib/libnccl.so.2, and which one is there is chance: pip "
            f"uninstall {' '.join(_NCCL)}, then install torch again."
        )
        return Finding("GPU", "NCCL", " and ".join(found), advice, "note")
    if found and not found[0].partition(" ")[0].endswith(major):
        advice = (
            f"Torch is for CUDA {major}: pip uninstall {found[0].split()[0]}, then torch again."
        )
        return Finding("GPU", "NCCL", found[0], advice, "note")
    return Finding("GPU", "NCCL", found[0] if found else "no package; a system's libnccl may serve")


def package_findings(has_gpus: bool) -> list[Finding]:
    """Python, torch, mpi4py and the optional packages."""
    found = [Finding("Python", "Python", platform.python_version()), _torch(has_gpus)]
    mpi4py = _installed(["mpi4py"])
    if mpi4py is None:
        found.append(Finding("Python", "mpi4py", "missing", install_command("mpi4py"), "bad"))
    else:
        found.append(Finding("Python", "mpi4py", mpi4py.split()[1]))
    for name, (use, extra) in _OPTIONAL.items():
        value = _installed([name])
        advice = "" if value else f"For {use}: {install_command(extra)}"
        shown = value.split()[1] if value else "missing"
        found.append(Finding("Python", name, shown, advice, "good" if value else "note"))
    return [*found, *(_gpu_packages() if has_gpus else ())]
