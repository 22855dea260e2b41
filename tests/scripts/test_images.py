"""The Dockerfiles: clean, and with nothing in them that the clone does not hold."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
IMAGES = sorted((REPO / "docker").glob("Dockerfile.*"))
REQUIREMENTS = REPO / "docker" / "requirements.py"


@pytest.fixture(params=IMAGES, ids=lambda path: path.suffix[1:])
def image(request):
    return request.param


def instructions(image):
    """Each instruction in one line, without comments."""
    text = re.sub(r"^\s*#.*\n", "", image.read_text(), flags=re.MULTILINE)
    return [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line]


def of(image, name):
    return [line.partition(" ")[2] for line in instructions(image) if line.startswith(f"{name} ")]


def test_there_is_one_for_each_kind_of_machine():
    """The Dockerfiles are one for CPU and one for CUDA."""
    assert [image.suffix for image in IMAGES] == [".cpu", ".cuda"]


def test_hadolint_is_silent(image):
    """hadolint has nothing to say about any Dockerfile."""
    tool = shutil.which("hadolint")
    assert tool, "hadolint is missing: pip install -e '.[dev]'"
    done = subprocess.run([tool, str(image)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_is_in_the_clone_and_reaches_the_builder(image):
    """.dockerignore leaves everything out but what it names after ``!``."""
    ignored, *kept = [
        line
        for line in (REPO / ".dockerignore").read_text().splitlines()
        if line and not line.startswith(("#", "**"))
    ]
    assert ignored == "*"
    for line in of(image, "COPY"):
        if line.startswith("--from"):
            continue
        for source in shlex.split(line)[:-1]:
            assert (REPO / source).exists(), line
            assert any(fnmatch.fnmatch(source, one.removeprefix("!")) for one in kept), line


def test_it_runs_as_nobody_special_and_without_leave_to_run_as_root(image):
    """Images run as user 1000, made before, and never allow mpirun to run as root."""
    assert of(image, "USER") == ["1000"]
    lines = instructions(image)
    assert lines.index("USER 1000") > lines.index(next(x for x in lines if "useradd" in x))
    assert "ALLOW_RUN_AS_ROOT" not in image.read_text()


def test_no_registry_and_no_index_is_named(image):
    """Whoever builds behind a mirror gives theirs by build arguments."""
    assert not re.search(r"https?://", image.read_text())
    assert not [line for line in instructions(image) if "index-url" in line]
    for line in of(image, "FROM"):
        assert re.match(r"python:\$\{PYTHON\}-slim( AS build)?$", line)


def test_every_layer_of_pip_keeps_no_cache(image):
    """All three pip installs keep no cache, and the package itself brings no dependencies."""
    installs = [line for line in of(image, "RUN") if "pip install" in line]
    assert len(installs) == 3  # torch, what is needed besides, and the package itself
    assert all("--no-cache-dir" in line for line in installs)
    assert "--no-deps" in installs[-1]


def printed(*extras, cwd=REPO):
    done = subprocess.run(
        [sys.executable, str(REQUIREMENTS), *extras],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


needs_tomllib = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the images' Python is 3.11 or newer, for tomllib"
)


@needs_tomllib
@pytest.mark.parametrize("cuda", ["12", "13"])
def test_the_layer_of_requirements_is_what_pyproject_declares_but_torch(cuda):
    """requirements.py lists dependencies, build requirements and extras, but no torch."""
    code, lines = printed("openmpi", f"cuda{cuda}")
    assert code == 0
    assert not [line for line in lines if line.startswith("torch")]
    names = {re.split(r"[^\w-]", line)[0] for line in lines}
    assert {"hatchling", "mpi4py", "networkx", "openmpi", f"cupy-cuda{cuda}x"} <= names


@needs_tomllib
def test_an_extra_that_there_is_not_fails_the_build():
    """requirements.py exits non-zero for an extra that pyproject.toml lacks."""
    assert printed("cuda99")[0] != 0
