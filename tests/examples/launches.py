"""Start an example by ``asyncddp run`` and alone; by torchrun ``test_self_contained`` does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.processes import REPO, Finished, run_to_end, warm_script, warm_server

__all__ = ["RANKS", "WAYS", "launch", "load"]

RANKS = {"asyncddp run": 2, "alone": 1}
"""Ways to start, and how many ranks each has in the tests."""
WAYS = ["asyncddp run", pytest.param("alone", marks=pytest.mark.nightly)]


def launch(way: str, script: str, *options: str, cwd: Path) -> Finished:
    """Run an example of this name to its end."""
    program = warm_server(frameworks=True).python
    words = [str(REPO / "examples" / script), *options]
    command = {
        "asyncddp run": [
            *(sys.executable, "-m", "asyncddp", "run", "-np", str(RANKS[way])),
            *warm_script(*words, frameworks=True),
        ],
        "alone": [program, *words],
    }
    return run_to_end(command[way], cwd=cwd, timeout=200)


def load(script: str) -> ModuleType:
    """Import an example as a module, whose main() is not called."""
    path = REPO / "examples" / script
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
