"""scripts/release: the real thing on a copy of this clone, and what it refuses."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
needs_tools = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("build", "hatchling", "pip", "twine"))),
    reason="needs build, hatchling, pip and twine: pip install -e '.[dev]'",
)


@pytest.fixture
def clone(tmp_path):
    """A repository of its own with what this clone holds, all committed."""
    path = tmp_path / "clone"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "asyncddp", "topology", "scripts"],
        cwd=REPO, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("this is no git repository")
    others = ["pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"]
    for name in [*listed.stdout.splitlines(), *others]:
        if (REPO / name).is_file() or (REPO / name).is_symlink():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, path / name, follow_symlinks=False)
    git(path, "init", "--quiet")
    commit(path)
    return path


def git(path, *words):
    who = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *who, *words], cwd=path, check=True, capture_output=True, text=True
    )
    return done.stdout


def commit(path):
    git(path, "add", "--all")
    git(path, "commit", "--quiet", "--message", "a state")


@pytest.fixture
def release(clone, tmp_path):
    """scripts/release of the clone, in an environment of its own with the packages of this one.

    In this one itself it would install the clone in the place of what is tested.
    """
    venv.create(tmp_path / "venv", with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    packages.rmdir()
    packages.symlink_to(sysconfig.get_path("purelib"))

    def run(*arguments):
        environ = {**os.environ, "ASYNCDDP_VENV": str(tmp_path / "venv")}
        return subprocess.run(
            [clone / "scripts" / "release", "--out", tmp_path / "out", *arguments],
            env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip

    return run


def test_what_is_not_committed_is_not_released(clone, release):
    """A wheel is of a commit that can be found again; a folder that is not empty is left alone."""
    (clone / "asyncddp" / "stray.py").touch()
    done = release()
    assert done.returncode == 1
    assert done.stderr == (
        "release: there are changes that are not committed, see git status: commit them first\n"
    )
    (clone / "asyncddp" / "stray.py").unlink()
    done = release("--out", str(clone))
    assert f"{clone} is not empty: remove what is there, or give another folder" in done.stderr


def test_a_release_is_of_its_own_version(clone, release):
    """A version that is none, has its tag already or is not the change log's is refused."""
    assert "one version is needed, such as 0.2.0 or 0.2.0rc1; got 'v0.2'" in release("v0.2").stderr
    assert "the newest heading of CHANGELOG.md is '## [Unreleased]'" in release("0.2.0").stderr
    git(clone, "tag", "v0.2.0")
    assert "there is a tag v0.2.0: give the next version" in release("0.2.0").stderr


@needs_tools
@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", [None, "9.8.7"])
def test_wheel_and_sdist_are_built_checked_and_tried(clone, release, tmp_path, version):
    """Both files come out whole, two ranks run from the wheel, and the rest is told.

    A release is tagged; between releases the version names the commit.
    """
    if version:
        log = (clone / "CHANGELOG.md").read_text(encoding="utf-8")
        log = log.replace("## [Unreleased]", f"## [{version}] - 2026-01-02")
        (clone / "CHANGELOG.md").write_text(log, encoding="utf-8")
        commit(clone)
    done = release(*filter(None, [version]))
    assert done.returncode == 0, done.stderr
    tagging = [f"tagging v{version}"] if version else []
    assert [line.split(" … ")[0] for line in done.stderr.splitlines()] == [
        "building", "checking the metadata", "checking the contents",
        "checking it in a clean environment", *tagging,
    ]  # fmt: skip
    assert git(clone, "tag").split() == [f"v{version}"] * bool(version)
    assert "twine upload" in done.stdout
    wheel, sdist = sorted((tmp_path / "out").iterdir(), key=lambda path: path.suffix, reverse=True)
    head = git(clone, "rev-parse", "HEAD")[:7]
    assert f"-{version}-" in wheel.name if version else f"+g{head}" in wheel.name
    assert f"Left to do by hand for {wheel.name.split('-')[1]}:" in done.stdout
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "asyncddp/py.typed",
        "asyncddp/__init__.pyi",
        "asyncddp/topology/graphs/ring.py",
    } <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "scripts/"))]
    with tarfile.open(sdist) as held:
        assert any(name.endswith("/CHANGELOG.md") for name in held.getnames())


@needs_tools
@pytest.mark.release
@pytest.mark.timeout(900)
def test_a_file_that_the_wheel_lacks_stops_the_release(clone, release):
    """The wheel is compared with the tree, so that a rule of the build cannot lose a file."""
    with (clone / "pyproject.toml").open("a") as file:
        file.write('\n[tool.hatch.build]\nexclude = ["asyncddp/py.typed"]\n')
    commit(clone)
    done = release()
    assert done.returncode == 1
    assert "missing: asyncddp/py.typed" in done.stderr
    assert "checking the contents failed" in done.stderr
