"""Groups of this folder's test files, fast and telling ones first, and their shares of the time.

``python -m tests.gpu.groups`` prints for each group a line with its name, its share and its files;
``scripts/gpu`` runs each in a pytest of its own, since an error of CUDA spoils a process for good.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["GROUPS", "Group", "groups_of", "place_of"]

FOLDER = Path(__file__).parent


class Group(NamedTuple):
    """Files that are run together: named ``test_gpu_<subject>.py``."""

    name: str
    share: int
    subjects: tuple[str, ...]


GROUPS = (
    Group("facts", 8, ("facts",)),
    Group("handles", 14, ("ipc", "nccl_alone")),
    Group("doctor-check", 20, ("doctor",)),
    Group("opening", 14, ("opening", "threads", "memory")),
    Group("transports", 24, ("transports", "nccl", "eight_ranks")),
    Group("weighted-sum", 5, ("weighted_sum",)),
    Group("staged", 7, ("staged",)),
    Group("windows", 5, ("windows",)),
    Group("others", 5, ()),
    Group("whole", 12, ("whole",)),
)
"""In the order in which they run; what is in none of them is in ``others``."""

_PLACES = {
    subject: (number, place)
    for number, group in enumerate(GROUPS)
    for place, subject in enumerate(group.subjects)
}
_OTHERS = (next(number for number, group in enumerate(GROUPS) if group.name == "others"), 0)


def place_of(file: str) -> tuple[int, int]:
    """Where a file comes: the number of its group, and its place there.

    Example:
        >>> place_of("test_gpu_facts.py") < place_of("test_gpu_new.py") < place_of(
        ...     "test_gpu_whole.py"
        ... )
        True
    """
    return _PLACES.get(file.removeprefix("test_gpu_").removesuffix(".py"), _OTHERS)


def groups_of(files: Iterable[str]) -> list[tuple[Group, list[str]]]:
    """The groups that have any of these files, in order, with their files."""
    ordered = sorted(files, key=lambda file: (place_of(file), file))
    found = [
        (group, [file for file in ordered if place_of(file)[0] == number])
        for number, group in enumerate(GROUPS)
    ]
    return [(group, files) for group, files in found if files]


if __name__ == "__main__":
    for group, files in groups_of(path.name for path in FOLDER.glob("test_gpu_*.py")):
        paths = (f"tests/gpu/{file}" for file in files)
        sys.stdout.write(" ".join([group.name, str(group.share), *paths]) + "\n")
