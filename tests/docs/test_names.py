"""Names of ours that a page mentions exist, and bounds that it gives are those of the code."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re

import pytest

import asyncddp
import asyncddp.integrations.bluefog
from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS
from asyncddp.compression import COMPRESSORS
from asyncddp.shm.arena import Arena
from asyncddp.tensors.allocation import _arena
from tests.docs.blocks import PAGES, REPO, blocks_of, prose_of

OTHER_SPELLINGS = ["docs/coming-from-bluefog.md"]
"""Pages that may show other names of the optimizer than the guides do."""


def is_ours(name):
    """Whether ``asyncddp.name`` is a public name, a package of its own, or a group of plug-ins."""
    groups = {registry._group for registry in (ALGORITHMS, COMPRESSORS)}
    there = hasattr(asyncddp, name) or f"asyncddp.{name}" in groups
    return there or importlib.util.find_spec(f"asyncddp.{name}") is not None


@pytest.mark.parametrize("page", PAGES)
def test_names_on_the_page_exist(page):
    """What follows ``asyncddp.``, ``bf.`` and ``topology.`` is a public name of that module."""
    text = prose_of(page)
    names = set(re.findall(r"\basyncddp\.([A-Za-z_]\w*)", text))
    assert [name for name in names if not is_ours(name)] == []
    graphs = set(re.findall(r"(?<![/\w])topology\.([A-Za-z_]\w*)", text)) - {"md", "rst"}
    assert [name for name in graphs if not hasattr(topology, name)] == []
    module = asyncddp.integrations.bluefog if page.endswith("from-bluefog.md") else asyncddp
    short = set(re.findall(r"\bbf\.([A-Za-z]\w+)", text))
    assert [name for name in short if not hasattr(module, name)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OTHER_SPELLINGS])
def test_optimizers_have_one_spelling(page):
    """``bf.DistributedOptimizer(optimizer, model, algorithm="…")``, in the code of each page."""
    code = "\n".join(block.text for block in blocks_of(page))
    assert re.findall(r"\bbf\.Distributed(?!Optimizer\b)\w*Optimizer\b", code) == []
    calls = re.findall(r"\bbf\.DistributedOptimizer\(((?:[^()]|\([^()]*\))*)\)", code)
    assert [call for call in calls if 'algorithm="' not in call] == []


def test_bounds_of_memory_are_those_of_the_allocators():
    """The page on machines gives the sizes of chunks and of free memory that is kept."""
    text = " ".join((REPO / "docs" / "guides" / "machines.md").read_text(encoding="utf-8").split())
    shared = Arena()
    try:
        chunk, limit = shared._blocks._chunk, shared._blocks._limit
    finally:
        shared.close()
    assert f"Shared memory comes in chunks of {chunk >> 20} MiB," in text
    assert f"At most {limit >> 30} GiB of free shared memory and " in text
    assert f"{_arena._blocks._limit >> 20} MiB of free private memory keep their pages" in text


def test_public_names_have_an_example_or_a_link():
    """The docstring of a public name runs an example; that of a variant leads to one that does."""
    without = [
        f"{module.__name__}.{name}"
        for module in (asyncddp, topology)
        for name in module.__all__
        if (value := getattr(module, name)) not in (topology.GRAPHS, topology.SCHEDULES)
        and inspect.isroutine(value) | inspect.isclass(value)
        and not (inspect.isclass(value) and issubclass(value, Exception))
        and not re.search(r">>> |:(func|class|meth):`|algorithm=|``adapt_", inspect.getdoc(value))
    ]
    assert without == []


def test_two_lines_of_a_bluefog_script_change():
    """The imports, and nothing else."""
    (diff,) = [b for b in blocks_of("docs/coming-from-bluefog.md") if b.language == "diff"]
    changed = [line for line in diff.text.splitlines() if line[:1] in ("-", "+")]
    assert [line.split()[0] for line in changed] == ["-import", "-from", "+import", "+from"]


def test_every_test_states_its_law():
    """Each test function has a docstring, which says what must hold."""
    without = [
        f"{path.name}::{node.name}"
        for path in sorted((REPO / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if ast.get_docstring(node) is None
    ]
    assert without == []
