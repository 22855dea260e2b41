"""What the page on plug-ins says of packages: their names are known, and conformance tests run."""

from __future__ import annotations

import os
import re
import sys
from configparser import ConfigParser

import pytest

from tests.docs.blocks import REPO, blocks_of
from tests.support import run_to_end

PAGE = "docs/guides/extending.md"


@pytest.fixture
def installed(tmp_path):
    """An environment in which the page's module is installed, with the page's entry points."""
    (module,) = [block for block in blocks_of(PAGE) if block.file == "my_plugins.py"]
    (declared,) = [block for block in blocks_of(PAGE) if "entry-points" in block.text]
    (tmp_path / "my_plugins.py").write_text(module.text, encoding="utf-8")
    table = ConfigParser()
    table.read_string(declared.text.replace('project.entry-points."', "").replace('"', ""))
    folder = tmp_path / "mine-1.0.dist-info"
    folder.mkdir()
    with (folder / "entry_points.txt").open("w", encoding="utf-8") as file:
        table.write(file)
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"}


def test_names_are_known_everywhere(installed):
    """By an optimizer, the simulator, and the registry of compressors."""
    code = (
        "import asyncddp as bf, torch\n"
        "from asyncddp import simulate\n"
        "from asyncddp.compression import COMPRESSORS\n"
        "bf.init()\n"
        "model = torch.nn.Linear(1, 1)\n"
        "sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "wrapped = bf.DistributedOptimizer(sgd, model, algorithm='damped')\n"
        "print(wrapped.algorithm, COMPRESSORS['max_int8']().name)\n"
        "problem = simulate.least_squares(4)\n"
        "sgd = simulate.optimizer_named('SGD', lr=0.1)\n"
        "print(len(simulate.train(problem, sgd, 'damped', steps=3).loss))\n"
    )
    done = run_to_end([sys.executable, "-W", "error", "-c", code], environ=installed)
    assert done.code == 0, done
    assert done.stdout == "damped max_int8\n4\n"


@pytest.mark.nightly
def test_the_conformance_tests_run_over_a_compressor_of_another_package(installed):
    """All of them pass, and there are many."""
    command = "-m pytest -q -p no:cacheprovider tests/conformance/test_compressors.py -k max_int8"
    done = run_to_end([sys.executable, *command.split()], environ=installed, timeout=300.0)
    assert done.code == 0, done
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 25, done
