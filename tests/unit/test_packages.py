"""What errors advise to install is what pyproject.toml asks for, and can be had."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from asyncddp import install_commands as packages
from asyncddp.install_commands import install_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
ALL = {*PROJECT["dependencies"], *(one for extra in EXTRAS.values() for one in extra)}
ROOMS = ("asyncddp", "topology", "docs", "examples", "scripts", "docker", "tests")
TEXTS = [
    path
    for path in (*(one for room in ROOMS for one in (REPO / room).rglob("*")), REPO / "README.md")
    if path.is_file()
    and path.suffix in ("", ".py", ".md", ".sh", ".ipynb", ".pyi", ".cpu", ".cuda")
    if path != Path(__file__)
]


@pytest.mark.parametrize("name", packages._REQUIREMENTS)
def test_advice_is_what_the_project_asks_for(name):
    """An extra's own requirements, bounds included; torch's and mpi4py's are everybody's."""
    declared = EXTRAS.get(name) or [
        one for one in PROJECT["dependencies"] if re.match(rf"{name}\W", one)
    ]
    assert install_command(name) == "pip install " + " ".join(f"'{one}'" for one in declared)


def test_no_text_advises_what_no_index_has():
    """The project is on no index yet: a clone's extras, `.[…]`, or the packages themselves."""
    assert len(TEXTS) > 300
    index = re.compile(r"""\basyncddp\[\w|pip3? install [^`\n]*(?<![\w./-])asyncddp(?![\w./-])""")
    found = {
        f"{path.relative_to(REPO)}: {match[0]}"
        for path in TEXTS
        for match in index.finditer(path.read_text(encoding="utf-8"))
    }
    assert not found


def test_the_table_of_supported_versions_is_the_project_s():
    """docs/guides/installing.md has the very bounds of pyproject.toml."""
    page = (REPO / "docs" / "guides" / "installing.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\w+) \| `(>=[\d.]+)` \|", page, re.MULTILINE))
    assert rows.pop("Python") == PROJECT["requires-python"]
    assert {"torch", "mpi4py", "Lightning", "cupy"} <= set(rows)
    declared = {re.sub(r"^(cupy)-\w+", r"\1", one) for one in ALL}
    assert {f"{name.lower()}{bound}" for name, bound in rows.items()} <= declared


def test_every_package_that_a_text_advises_has_the_bound_of_the_project():
    """`'scipy>=1.10'` in a message is the very requirement that pyproject.toml has."""
    advice = re.compile(r"pip install ((?:'[\w-]+[<>=][^']*' ?)+)")
    found = {
        requirement
        for path in TEXTS
        if path.parts[len(REPO.parts)] != "tests"
        for match in advice.finditer(path.read_text(encoding="utf-8"))
        for requirement in re.findall(r"'([^']+)'", match[1])
    }
    assert {"scipy>=1.10", "matplotlib>=3.8"} <= found
    assert found <= ALL
