"""The batch scripts of examples/slurm, as far as they can be read without Slurm."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.docs.parsed_commands import check_command

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((REPO / "examples" / "slurm").glob("*.sh"))
OPTIONS = {
    "job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "time", "output",
}  # fmt: skip


@pytest.fixture(params=SCRIPTS, ids=lambda path: path.name)
def script(request):
    return request.param


def test_there_are_some():
    """The batch scripts in examples/slurm are cpu.sh, gpu.sh and srun.sh."""
    assert {path.name for path in SCRIPTS} == {"cpu.sh", "gpu.sh", "srun.sh"}


def test_options_come_before_the_first_command_or_slurm_does_not_read_them(script):
    """No #SBATCH line follows a command; all are known, and size and time are given."""
    lines = script.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    late = [line for line in lines[first:] if line.startswith("#SBATCH")]
    given = [line.split("=")[0].removeprefix("#SBATCH --") for line in lines[:first]
             if line.startswith("#SBATCH")]  # fmt: skip
    assert late == []
    assert set(given) <= OPTIONS
    assert {"nodes", "ntasks-per-node", "cpus-per-task", "time"} <= set(given)


def test_every_command_of_ours_can_be_read(script, tmp_path):
    """With a script in place of the arguments, and numbers in place of Slurm's variables."""
    (tmp_path / "train.py").write_text("")
    text = script.read_text().replace("\\\n", " ")
    text = re.sub(r'"\$\{@:\?[^}]*\}"', "train.py", text)
    text = re.sub(r'"?\$\{?(?:SLURM_\w+|MPI)(?::-(\w+))?\}?"?', lambda m: m[1] or "4", text)
    commands = [line for line in text.splitlines() if re.match(r"(asyncddp|srun) ", line)]
    assert commands
    for command in commands:
        check_command(shlex.split(command), tmp_path)


def test_each_says_how_it_is_used(script):
    """The sbatch call stands in the script's header and in its usage message."""
    name = f"sbatch examples/slurm/{script.name}"
    text = script.read_text()
    assert name in text.split("set -euo")[0]
    assert f"usage: {name}" in text
