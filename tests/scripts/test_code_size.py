"""scripts/check size: what it counts as lines, files and long files, and what is over budget."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.support.processes import REPO

MODULE = '''"""Docstring
of a module."""

from os import (
    path,
)

# comment


class Named:
    """Docstring."""

    text = """several

    # lines"""  # five statements and clauses, of which this one has three lines

    def verb(self):
        """Docstring."""
        if path:
            import sys  # not counted
        return """Not a docstring."""
'''


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "scripts" / "lib"))
    import code_size

    return code_size


@pytest.fixture
def clone(tmp_path):
    """A small tree with a budget of exactly what it holds."""
    shutil.copytree(REPO / "scripts" / "lib", tmp_path / "scripts" / "lib")
    for script in tmp_path.rglob("*.py"):
        if script.name != "code_size.py":
            script.unlink()
    for name in ("asyncddp/ops/verb.py", "asyncddp/__init__.py", "tests/test_verb.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(MODULE)
    code = "import code_size as c; print(c.code_lines(open(c.__file__).read()))"
    size = check(tmp_path / "scripts" / "lib", "-c", code).stdout
    (tmp_path / "scripts" / "lib" / "size_budget.toml").write_text(
        f"""
        [code_lines]
        "asyncddp/(top)" = 7
        "asyncddp/ops" = 7
        tests = 7
        scripts = {size}
        [files]
        asyncddp = 2
        tests = 1
        scripts = 1
        [long_files]
        """
    )
    return tmp_path


def check(folder, *words):
    command = [sys.executable, *(words or ("scripts/lib/code_size.py",))]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_docstrings_comments_blank_lines_and_imports_are_not_counted(counting):
    """A string that is no docstring counts with all its lines, blank ones and "# lines" too."""
    assert counting.code_lines(MODULE) == 7
    assert counting.code_lines(MODULE.replace('"""', "'''")) == 7
    assert counting.code_lines("# nothing\n") == 0


def test_a_tree_within_its_budget_passes_and_shows_its_rooms_beside_the_aims(clone):
    """A line per room with size, budget and aim."""
    done = check(clone)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["asyncddp/ops", "7", "7"] in lines
    assert ["tests", "7", "7", "40000"] in lines
    assert ["asyncddp,", "all", "rooms", "14", "32000"] in lines


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("asyncddp/ops/verb.py", MODULE + "more = 1\n", "asyncddp/ops has 8 code lines, and its"),
        ("asyncddp/new/verb.py", "x = 1\n", "asyncddp/new has 1 code lines, and its budget is 0"),
        ("tests/test_verb.py", MODULE + "more = 1\n", "tests has 8 code lines, and its budget"),
        ("scripts/more.py", "# nothing\n", "scripts has 2 files, and its budget is 1"),
        ("asyncddp/ops/verb.py", "#\n" * 351, "asyncddp has 1 files over 350 lines, and its"),
    ],
)
def test_a_planted_excess_fails_and_is_named_with_the_remedy(clone, name, text, told):
    """The room, its size, its budget, and what to do."""
    (clone / name).parent.mkdir(exist_ok=True)
    (clone / name).write_text(text)
    done = check(clone)
    assert done.returncode == 1
    assert told in done.stderr
    assert "size_budget.toml in the same commit and say why" in done.stderr


def test_the_clone_keeps_its_budget(counting):
    """The rooms of the budget are those of the tree, none of them left over."""
    budget = counting.tomllib.loads((REPO / counting.BUDGET).read_text(encoding="utf-8"))
    rooms = {f"asyncddp/{path.name}" for path in (REPO / "asyncddp").iterdir()}
    assert {room for room in budget["code_lines"] if "(" not in room} <= rooms | {
        "tests",
        "scripts",
    }
