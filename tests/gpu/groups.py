"""Groups of this folder's tests, fast and telling ones first: the rows of ``scripts/gpu``'s plan.

``python -m tests.gpu.groups`` prints for each group a line with its name, its limit in seconds,
what ranks need that share a GPU, the words of ``pytest -k`` and its files; ``scripts/gpu`` runs
each in a pytest of its own, since an error of CUDA spoils a process for good. ``python -m
tests.gpu.groups FOLDER`` says which defaults the results in a folder permit.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["GROUPS", "Group", "groups_of", "permitted", "place_of"]

FOLDER = Path(__file__).parent
ALONE, HOSTS, RANKS, UCX = "-", "hosts", "ranks", "ucx"
"""What ranks that share a GPU need: nothing, names of machines of their own for NCCL, an NCCL that
lets ranks share a GPU, or an MPI library that takes GPU memory by UCX."""
_NCCL_2 = "mpi-2 and nccl and not mpi_cuda"


class Group(NamedTuple):
    """Files that are run together, named ``test_gpu_<subject>.py``, and which of their tests."""

    name: str
    seconds: int
    subjects: tuple[str, ...]
    needs: str = ALONE
    words: str = "-"


GROUPS = (
    Group("torch-nccl", 45, ("nccl_torch",), HOSTS, "collectives_and_messages"),
    Group("facts", 20, ("facts",)),
    Group("handles", 80, ("ipc", "nccl_alone")),
    Group("nccl-2", 140, ("nccl", "transports"), HOSTS, _NCCL_2),
    Group("nccl-4", 90, ("nccl", "departures"), HOSTS, "mpi-4 or told"),
    Group("auto-4", 60, ("auto",), HOSTS),
    Group("nccl-shared", 60, ("nccl", "transports"), RANKS, f"{_NCCL_2} and not each_method"),
    Group("mpi-cuda", 60, ("transports",), UCX, "mpi-2 and mpi_cuda"),
    Group("torch-hooks", 60, ("nccl_torch",), HOSTS, "hook or fsdp2"),
    Group("cuda-2", 90, ("transports",), ALONE, "mpi-2 and (cuda_staged or cuda_ipc)"),
    Group("windows", 40, ("windows", "weighted_sum", "staged")),
    Group("opening", 90, ("opening", "threads", "memory")),
    Group("others", 60, ()),
    Group("cuda-4", 120, ("transports",), ALONE, "mpi-4 and (cuda_staged or cuda_ipc)"),
    Group("doctor-check", 90, ("doctor",)),
    Group("eight-ranks", 90, ("eight_ranks",)),
    Group("whole", 120, ("whole",)),
)
"""In the order in which they run; a file that is in none of them is in ``others``."""

_PLACES: dict[str, tuple[int, int]] = {}
for _number, _group in enumerate(GROUPS):
    for _place, _subject in enumerate(_group.subjects):
        _PLACES.setdefault(_subject, (_number, _place))
_OTHERS = (next(number for number, group in enumerate(GROUPS) if group.name == "others"), 0)

_PERMITTED = {
    "cuda_ipc inside, nccl between machines and for sums": (
        *("torch-nccl", "nccl-2", "nccl-4", "auto-4"),
    ),
    "mpi_cuda between machines": ("mpi-cuda",),
    "cuda_ipc": ("handles", "cuda-2"),
}
"""Defaults, and the groups that must have passed on a GPU before."""


def _subject(file: str) -> str:
    return file.removeprefix("test_gpu_").removesuffix(".py")


def place_of(file: str) -> tuple[int, int]:
    """Where a file comes: the number of the first group that has it, and its place there.

    Example:
        >>> place_of("test_gpu_facts.py") < place_of("test_gpu_new.py") < place_of(
        ...     "test_gpu_whole.py"
        ... )
        True
    """
    return _PLACES.get(_subject(file), _OTHERS)


def groups_of(files: Iterable[str]) -> list[tuple[Group, list[str]]]:
    """The groups that have any of these files, in order, with their files."""
    there = sorted(files)
    named = {subject for group in GROUPS for subject in group.subjects}
    found = []
    for group in GROUPS:
        mine = [file for subject in group.subjects for file in there if _subject(file) == subject]
        if group.name == "others":
            mine += [file for file in there if _subject(file) not in named]
        found.append((group, mine))
    return [(group, mine) for group, mine in found if mine]


def _passed(file: Path) -> str:
    """Whether the tests of a group have passed, by their XML of JUnit; else what was wrong."""
    if not file.exists():
        return "has no results"
    suite = next(ET.parse(file).getroot().iter("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    if wrong := counts["failures"] + counts["errors"]:
        return f"has {wrong} failures"
    return "" if counts["tests"] > counts["skipped"] else "was skipped"


def permitted(folder: Path) -> list[str]:
    """For each default, whether the results in a folder permit it, in a sentence."""
    found = []
    for default, names in _PERMITTED.items():
        told = {name: _passed(folder / f"tests-{name}.xml") for name in names}
        waits = ", ".join(f"{name} {why}" for name, why in told.items() if why)
        found.append(f"{default}: {'waits: ' + waits if waits else 'permitted'}")
    return found


def _main(folder: str = "") -> None:
    if folder:
        sys.stdout.write("".join(f"{line}\n" for line in permitted(Path(folder))))
        return
    for group, files in groups_of(path.name for path in FOLDER.glob("test_gpu_*.py")):
        paths = " ".join(f"tests/gpu/{file}" for file in files)
        line = (group.name, str(group.seconds), group.needs, paths, group.words)
        sys.stdout.write("|".join(line) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
