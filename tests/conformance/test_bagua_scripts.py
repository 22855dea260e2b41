"""Whole scripts of Bagua, in our words, run when the first word of their imports is changed."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

import asyncddp as bf
from tests.support.processes import run_to_end, warm_script

SCRIPTS = Path(__file__).parent / "bagua_scripts"
NAMES = ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam"]
OLD = ["quantize", "decentralize", "sg-allreduce", "allreduce"]
LINE = r"rank (\d), (\S+): (\S+) (\d+)$"


def changed(name):
    """A script with its imports changed, and nothing else."""
    text = (SCRIPTS / name).read_text(encoding="utf-8")
    pattern = re.compile(r"^(import|from) bagua\.", flags=re.MULTILINE)
    new, count = pattern.subn(r"\1 asyncddp.integrations.bagua.", text)
    assert count == text.count("bagua.torch_api")
    return new


def printed(text):
    """What ranks have printed: rank and name → number, and how many."""
    rows = re.findall(LINE, text, flags=re.MULTILINE)
    return {(int(rank), name): (float(number), int(count)) for rank, name, number, count in rows}


def run_in_threads(monkeypatch, script, words, ranks=2):
    monkeypatch.setattr(sys, "argv", [script, *words])
    code, output = compile(changed(script), script, "exec"), io.StringIO()
    with contextlib.redirect_stdout(output), bf.local_world(ranks) as world:
        world.run(lambda: exec(code, {"__name__": "__main__"}))
    return printed(output.getvalue())


def check_new(found, names, ranks=2):
    steps = 4 * 256 // 16 // ranks
    assert set(found) == {(rank, name) for rank in range(ranks) for name in names}
    limits = {"async": 0.3}  # how often it averages depends on how busy the machine is
    late = {key: loss for key, (loss, _) in found.items() if loss > limits.get(key[1], 0.2)}
    assert late == {}
    assert {count for _, count in found.values()} == {steps}


def test_the_new_api_in_threads(monkeypatch):
    """Every algorithm learns, by the very loop of the script."""
    check_new(run_in_threads(monkeypatch, "new_api.py", [*NAMES, "async"]), [*NAMES, "async"])


def test_the_old_api_in_threads(monkeypatch):
    """Training goes on through switches, in each of which the stage is counted."""
    found = run_in_threads(monkeypatch, "old_api.py", OLD)
    assert [found[0, name][1] for name in OLD] == [2, 3, 4, 5]
    assert found[1, "allreduce"][0] < found[1, "quantize"][0]


@pytest.mark.mpi(2)
@pytest.mark.launches
def test_the_new_api_in_processes(tmp_path):
    """The same script under the launcher."""
    script = tmp_path / "train.py"
    script.write_text(changed("new_api.py"), encoding="utf-8")
    names = ["gradient_allreduce", "decentralized", "async"]
    command = [sys.executable, "-m", "asyncddp", "run", "-np", "2"]
    done = run_to_end([*command, *warm_script(str(script)), *names], cwd=tmp_path, environ={})
    assert done.code == 0, done
    assert not done.left
    check_new(printed(done.stdout), names)
