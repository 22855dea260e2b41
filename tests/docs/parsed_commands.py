"""Commands for machines that are not here, read as far as this machine can read them."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
from pathlib import Path

import click
from click.testing import CliRunner

from asyncddp.cli.main import main
from tests.docs.blocks import REPO

__all__ = ["check_script"]

OTHERS = {"apt-get", "cd", "chmod", "conda", "git", "module", "source"}
"""Commands of the system, which are believed."""


def check_script(text: str, folder: Path) -> None:
    """Fail where bash cannot read a script, or we cannot read one of its commands."""
    read = subprocess.run(
        ["bash", "-n"], input=text, capture_output=True, text=True, timeout=20, check=False
    )
    assert read.returncode == 0, read.stderr
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    commands = [words for line in lines if (words := shlex.split(line, comments=True))]
    assert commands, "a script without a command"
    for words in commands:
        check_command(words, folder)


def check_command(words: list[str], folder: Path) -> None:
    """Fail where a command is none, or has options or files that there are not."""
    while re.fullmatch(r"\w+=.*", words[0]) or words[0] == "export":
        words = words[1:]
        if not words:
            return
    name, *rest = words
    if name in ("asyncddp", "bfrun"):
        _check_ours(["run", *rest] if name == "bfrun" else rest, folder)
    elif "scripts/" in name:
        _check_our_script(REPO / name, [word for word in rest if word.startswith("-")])
    elif name == "pip":
        _check_pip(rest)
    elif name == "./set_conda_down.sh":
        _check_our_script(REPO / name, [word for word in rest if word.startswith("--")])
    elif name in ("docker", "apptainer"):
        _check_container(rest, folder)
    elif name in (
        "mpirun",
        "mpiexec",
        "srun",
        "sbatch",
        "salloc",
        "python",
        "torchrun",
        "accelerate",
    ):
        _check_files(rest, folder)
    elif name == "ssh":
        assert rest, "ssh without a host"
    else:
        assert name in OTHERS, f"{name!r} is no command that a page may show unexplained"


def _check_ours(words: list[str], folder: Path) -> None:
    """Have ``asyncddp run`` say what it would start, and other commands read their options."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        if words[0] == "run":
            done = CliRunner().invoke(main, ["run", "--dry-run", *words[1:]])
            assert done.exit_code == 0, done.output
            assert "-m asyncddp.launch.rank" in done.output
            return
        if words == ["--version"]:
            assert CliRunner().invoke(main, words).exit_code == 0
            return
        group: click.Command | None = main
        while isinstance(group, click.Group):
            name, *words = words
            with click.Context(group) as context:
                group = group.get_command(context, name)
            assert group, f"there is no command {name!r}"
        assert group
        group.make_context(name, list(words)).close()
    finally:
        os.chdir(here)


def _check_our_script(script: Path, options: list[str]) -> None:
    """The script is there, and its text knows the options."""
    assert os.access(script, os.X_OK), f"{script} is no script of ours"
    text = script.read_text(encoding="utf-8")
    assert [option for option in options if option not in text] == []


def _check_pip(words: list[str]) -> None:
    """Extras are those of the package, unless its wheel is named."""
    if words[0] == "uninstall" or any(word.endswith(".whl") for word in words):
        assert "asyncddp" in words[-1] or "--no-index" in words
        return
    assert words[0] in ("install", "wheel")
    declared = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r"\[([\w,]+)\]", " ".join(words))
    assert named, f"pip install {words[1:]} names no extra of ours"
    for extra in ",".join(named).split(","):
        assert f"\n{extra} = [" in declared, f"there is no extra {extra!r}"


def _check_container(words: list[str], folder: Path) -> None:
    """Dockerfiles are there and know their build arguments; what runs inside is read as outside."""
    pairs = list(itertools.pairwise(words))
    given = dict(pairs)
    if "--file" in given:
        text = (REPO / given["--file"]).read_text(encoding="utf-8")
        named = [b for a, b in pairs if a == "--build-arg"]
        assert [one for one in named if f"\nARG {one.partition('=')[0]}=" not in text] == []
    if "asyncddp" in words:
        check_command(words[words.index("asyncddp") :], folder)
    _check_files(words, folder)


def _check_files(words: list[str], folder: Path) -> None:
    """Scripts that are named lie in the page's folder, or in the clone."""
    scripts = [word for word in words if re.fullmatch(r"[\w/.-]+\.(py|sh|sbatch)", word)]
    missing = [name for name in scripts if not (folder / name).exists() | (REPO / name).exists()]
    assert missing == []
