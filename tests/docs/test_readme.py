"""What README.md says besides its scripts is true: its names and files exist."""

from __future__ import annotations

import os
import re

from tests.docs.blocks import REPO, blocks_of

TEXT = (REPO / "README.md").read_text(encoding="utf-8")
BLOCKS = blocks_of("README.md")
FIRST_COLUMN = re.findall(r"^\| `(\w+)(\(.*?\))?` \|", TEXT, flags=re.MULTILINE)


def test_there_are_blocks_and_tables():
    """The tests below are not empty by accident."""
    assert {block.language for block in BLOCKS} == {"python", "bash", "text"}
    assert len(FIRST_COLUMN) >= 8


def test_graphs_in_the_table_exist():
    """Every graph or schedule of the table is a function of ``topology``."""
    import topology

    named = [name for name, call in FIRST_COLUMN if call]
    assert named
    assert not [name for name in named if not hasattr(topology, name)]


def test_methods_in_the_table_exist():
    """Every method of the table is a registered algorithm."""
    from asyncddp.algorithms import ALGORITHMS

    table = TEXT.split("| `algorithm` |")[1].split("\n\n")[0]
    cells = re.findall(r"^\|([^|]*)\|", table, flags=re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(named) == 7
    assert set(named) <= set(ALGORITHMS)


def test_files_and_rooms_exist():
    """Linked files, scripts and the rooms of the map are there."""
    links = re.findall(r"\]\(([^):]+)\)", TEXT)
    commands = re.findall(r"^(\./\S+)", TEXT, flags=re.MULTILINE)
    rooms = re.findall(r"^([a-z/]+/)  ", TEXT, flags=re.MULTILINE)
    assert links
    assert commands
    assert len(rooms) > 10
    missing = [path for path in [*links, *commands, *rooms] if not (REPO / path).exists()]
    assert not missing
    assert all(os.access(REPO / command, os.X_OK) for command in commands)


def test_extras_in_the_table_are_those_of_the_package():
    """The table of extras names each extra of pyproject.toml, and none besides."""
    section = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    section = section.split("[project.optional-dependencies]")[1].split("\n[project")[0]
    declared = set(re.findall(r"^(\w+) = \[", section, flags=re.MULTILINE))
    table = TEXT.split("| extra |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`.*?`) \|", table, flags=re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == declared


def test_contributing_names_every_area_of_tests():
    """CONTRIBUTING.md lists every folder that holds tests, and none that is not there."""
    text = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^    tests/(\w+) ", text, flags=re.MULTILINE))
    tests = REPO / "tests"
    assert {path.relative_to(tests).parts[0] for path in tests.glob("*/**/test_*.py")} <= named
    assert all((tests / name).is_dir() for name in named)
