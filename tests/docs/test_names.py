"""What the migration pages show is true: their scripts run, and their names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import asyncddp
import asyncddp.integrations.bluefog
import topology

REPO = Path(__file__).resolve().parents[2]
PAGES = ["coming-from-bluefog", "coming-from-horovod", "coming-from-ddp"]
by_page = pytest.mark.parametrize("page", PAGES)


def text_of(page):
    return (REPO / "docs" / f"{page}.md").read_text(encoding="utf-8")


def diff_of(page):
    """The lines of the page's one diff."""
    (block,) = re.findall(r"^```diff\n(.*?)^```$", text_of(page), flags=re.MULTILINE | re.DOTALL)
    return block.splitlines()


@by_page
def test_the_new_script_runs(tmp_path, page):
    """What is left of the diff is a whole script: it runs by itself, without a warning."""
    kept = [line[1:] for line in diff_of(page) if not line.startswith("-")]
    script = tmp_path / "train.py"
    script.write_text("\n".join([*kept, ""]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@by_page
def test_the_old_script_is_python(page):
    """What the diff starts from can be read as a script too."""
    old = [line[1:] for line in diff_of(page) if not line.startswith("+")]
    compile("\n".join(old), page, "exec")


def test_two_lines_of_a_bluefog_script_change():
    """The imports, and nothing else."""
    changed = [line for line in diff_of("coming-from-bluefog") if line[:1] in "-+"]
    changed = [line for line in changed if line]
    assert [line.split()[0] for line in changed] == ["-import", "-from", "+import", "+from"]


@by_page
def test_names_on_the_page_exist(page):
    """Of our modules, with the prefixes that the page says."""
    text = text_of(page)
    names = set(re.findall(r"\basyncddp\.(\w+)", text)) - {"integrations"}
    assert [name for name in names if not hasattr(asyncddp, name)] == []
    graphs = set(re.findall(r"\btopology\.(\w+)", text))
    assert [name for name in graphs if not hasattr(topology, name)] == []
    module = asyncddp.integrations.bluefog if page.endswith("bluefog") else asyncddp
    short = set(re.findall(r"\bbf\.([A-Za-z]\w+)", text))
    assert short
    assert [name for name in short if not hasattr(module, name)] == []
    links = re.findall(r"\]\(([^):]+)\)", text)
    assert all((REPO / "docs" / link).exists() for link in links)
