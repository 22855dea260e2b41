"""Which Python packages are there, read from their metadata: none of them is imported."""

from __future__ import annotations

import platform
import runpy
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, version

from asyncddp.launch.doctor.finding import Finding

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
        return Finding("Python", "torch", "missing", "pip install 'torch>=2.6'", "bad")
    cuda = torch_cuda()
    value = f"{name.split()[1]}, " + ("CPU build" if cuda is None else f"for CUDA {cuda}")
    if cuda is None and has_gpus:
        advice = "This torch cannot use the GPUs: install its CUDA build (see pytorch.org)."
        return Finding("Python", "torch", value, advice, "note")
    return Finding("Python", "torch", value)


def _gpu_packages() -> Iterable[Finding]:
    """What only a machine with GPUs needs."""
    cuda = torch_cuda() or "12"
    nccl, cupy = _installed(_NCCL), _installed(_CUPY)
    yield Finding("GPU", "NCCL", nccl or "no package; a system's libnccl may serve")
    advice = "" if cupy else f"NCCL is reached through cupy: pip install 'asyncddp[cuda{cuda[:2]}]'"
    yield Finding("GPU", "cupy", cupy or "missing", advice, "good" if cupy else "note")


def package_findings(has_gpus: bool) -> list[Finding]:
    """Python, torch, mpi4py and the optional packages."""
    found = [Finding("Python", "Python", platform.python_version()), _torch(has_gpus)]
    mpi4py = _installed(["mpi4py"])
    if mpi4py is None:
        found.append(Finding("Python", "mpi4py", "missing", "pip install 'mpi4py>=4'", "bad"))
    else:
        found.append(Finding("Python", "mpi4py", mpi4py.split()[1]))
    for name, (use, extra) in _OPTIONAL.items():
        value = _installed([name])
        advice = "" if value else f"For {use}: pip install 'asyncddp[{extra}]'"
        shown = value.split()[1] if value else "missing"
        found.append(Finding("Python", name, shown, advice, "good" if value else "note"))
    return [*found, *(_gpu_packages() if has_gpus else ())]
