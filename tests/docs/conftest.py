"""A warm Python for the scripts of all pages, and a folder for each page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import REPO, Block, blocks_of

Run = Callable[[str, Path], tuple[int, str]]


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


@pytest.fixture(scope="session")
def run_python() -> Iterator[Run]:
    """Run a script's text in a folder; give its exit code and what it has printed."""
    warm = Path(__file__).with_name("warm_python.py")
    process = subprocess.Popen(
        [sys.executable, str(warm)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdin
    assert process.stdout

    def run(text: str, folder: Path) -> tuple[int, str]:
        script, output = folder / ".script.py", folder / ".output"
        script.write_text(text, encoding="utf-8")
        process.stdin.write(json.dumps([str(script), str(folder), str(output)]) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline()), output.read_text(encoding="utf-8")

    yield run
    process.stdin.close()
    assert process.wait(20) == 0
    process.stdout.close()


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
