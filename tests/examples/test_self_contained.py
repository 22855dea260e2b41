"""Each script of examples/ is one file that runs wherever it is copied, under each launcher."""

from __future__ import annotations

import ast
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.processes import REPO, Finished, run_to_end, warm_script, warm_server

ELSEWHERE = {"finetune_trainer.py", "kill.py", "ray_train.py"}  # have tests of their own
SCRIPTS = sorted({path.name for path in (REPO / "examples").glob("*.py")} - ELSEWHERE)
OPTIONS = {
    "benchmark.py": ("--methods", "local", "ddp", "adapt_then_combine", "choco_sgd:sign"),
    "compression.py": ("--runs", "gradient_allreduce", "bytegrad"),
    "digits.py": ("--methods", "ddp", "win_put"),
}
NEEDS = {"lightning_digits.py": "lightning"}
RESULTS = {
    "benchmark.py": "ddp is on gloo; its bytes are 2 (n - 1) / n of the gradients'",
    "consensus.py": "Nearest to the average: ",
    "optimization.py": "Plain diffusion ends ",
}


def copied(name: str, folder: Path) -> str:
    """The path of a copy of a script, away from all that is beside it in examples/."""
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"the package {NEEDS[name]} is not installed")
    return str(shutil.copy(REPO / "examples" / name, folder))


def run_script(name: str, folder: Path, launcher: str, *options: str) -> Finished:
    """Run a copy of a script, small, by ``asyncddp run``, by ``torchrun`` or alone."""
    words = (copied(name, folder), "--smoke", *OPTIONS.get(name, ()), *options)
    if launcher == "alone":
        return run_to_end(warm_server().command(*words), cwd=folder)
    python = warm_server(frameworks=True).python
    if launcher == "torchrun":
        start = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python")
        return run_to_end([python, *start, python, *words], cwd=folder)
    start = (sys.executable, "-m", "asyncddp", "run", "-np", "2")
    return run_to_end([*start, *warm_script(*words, frameworks=True)], cwd=folder)


def test_no_script_imports_another_file():
    """Each can be copied alone."""
    for name in SCRIPTS:
        tree = ast.parse((REPO / "examples" / name).read_text(encoding="utf-8"))
        taken = [node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        for node in ast.walk(tree):
            taken += [one.name for one in node.names] if isinstance(node, ast.Import) else []
        beside = {Path(other).stem for other in SCRIPTS}
        assert not {module.split(".")[0] for module in taken} & {*beside, "", "examples"}, name


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("consensus.py", "asyncddp run"),
        ("compression.py", "torchrun"),
        *(
            pytest.param(name, "torchrun", marks=pytest.mark.nightly)
            for name in SCRIPTS
            if name != "compression.py"
        ),
    ],
)
def test_runs_on_two_ranks_without_another_file(tmp_path, name, launcher):
    """A copy of the script alone runs to its end and leaves no process."""
    done = run_script(name, tmp_path, launcher)
    assert done.code == 0, done
    assert not done.left
    assert RESULTS.get(name, "") in done.stdout, done


@pytest.mark.parametrize("name", ["consensus.py", "optimization.py"])
def test_ranks_are_threads_without_a_launcher(tmp_path, name):
    """Started alone the script has as many threads for ranks as ``--ranks`` says, and draws."""
    done = run_script(name, tmp_path, "alone", "--ranks", "3", "--out", "found.png")
    assert done.code == 0, done
    assert " 3 ranks" in done.stdout
    assert RESULTS[name] in done.stdout
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_benchmark_alone_says_that_it_communicates_nothing(tmp_path):
    """One rank measures all methods, sends no byte, and is told how to start more."""
    done = run_script("benchmark.py", tmp_path, "alone", "--out", "found.png")
    assert done.code == 0, done
    assert "One rank communicates nothing, by ddp neither: asyncddp run -np 4" in done.stdout
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if line.startswith("│")]
    assert {cells[-1].strip() for cells in rows} == {"0.000"}, done
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("consensus.py", ("--topology", "rign"), "argument --topology: invalid choice: 'rign'"),
        ("consensus.py", ("--ranks", "1"), "argument --ranks: expected at least 2, got 1"),
        ("optimization.py", ("--problem", "ridge"), "argument --problem: invalid choice: 'ridge'"),
        ("optimization.py", ("--rate", "0"), "argument --rate: expected a number above 0, got 0"),
        ("benchmark.py", ("--methods", "sgd"), "argument --methods: expected one of local, ddp, "),
        ("benchmark.py", ("--model", "no.py:f"), "argument --model: expected mlp, gpt, resnet or "),
        ("benchmark.py", ("--seconds", "-1"), "--seconds: expected a number above 0, got -1"),
        ("digits.py", ("--target", "0"), "argument --target: expected a number above 0, got 0"),
    ],
)
def test_a_bad_option_is_named(tmp_path, name, options, words):
    """The script ends with 2 before anything is started, and says what it got and expected."""
    done = run_to_end(warm_server().command(copied(name, tmp_path), *options), cwd=tmp_path)
    assert done.code == 2, done
    assert words in done.stderr
