"""How scripts of all pages are run, and a folder for each page."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.blocks import REPO, Block, blocks_of
from tests.support.processes import warm_server

RUN = """
import runpy, sys, warnings
warnings.simplefilter("error")
del sys.argv[0]  # as Python names a script
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def environment() -> dict[str, str]:
    """This environment, in which commands find our Python, its tools and this clone first."""
    tools = str(Path(sys.executable).parent)
    path = os.pathsep.join([tools, os.environ["PATH"]])
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return {
        **inherited,
        "PATH": path,
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }


def run_python(text: str, folder: Path) -> tuple[int, str]:
    """Run a script's text in a folder as ``python -W error`` does, in a process that is warm.

    Returns:
        Its exit code and what it has printed.
    """
    script = folder / ".script.py"
    script.write_text(text, encoding="utf-8")
    done = subprocess.run(
        warm_server().command("-c", RUN, str(script)),
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a page, with the files that its blocks name."""
    made: dict[str, Path] = {}

    def folder(page: str) -> Path:
        if page not in made:
            made[page] = tmp_path_factory.mktemp(Path(page).stem)
            (made[page] / "examples").symlink_to(REPO / "examples")
            for block in blocks_of(page):
                if block.file:
                    (made[page] / block.file).write_text(block.script, encoding="utf-8")
        return made[page]

    return folder


def name_of(block: Block) -> str:
    """A block's name in the list of tests."""
    return str(block)
