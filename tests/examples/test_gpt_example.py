"""examples/gpt.py: it learns the same on one rank and on many, resumes, and ends by the clock."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPO, Finished, run_to_end, warm_script, warm_server

SCRIPT = str(REPO / "examples" / "gpt.py")
ASYNCDDP = (sys.executable, "-m", "asyncddp")


def run_gpt(ranks: int, *options: str, cwd: Path, timeout: float = 120) -> Finished:
    options = (*options, "--smoke", "--out", "run")
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(cwd / "compiled")}
    if ranks == 1:
        command = warm_server().command(SCRIPT, *options)
        return run_to_end(command, cwd=cwd, timeout=timeout, environ=environ)
    command = [*ASYNCDDP, "run", "-np", str(ranks), *warm_script(SCRIPT, *options)]
    return run_to_end(command, cwd=cwd, timeout=timeout, environ=environ)


def records_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "words",
    [
        "choco_sgd --compression sign",
        "alone",
        pytest.param("ddp", marks=pytest.mark.nightly),
        pytest.param("diloco --every 2", marks=pytest.mark.nightly),
        pytest.param("muloco --every 2 --optimizer muon", marks=pytest.mark.nightly),
    ],
)
def test_methods_run_and_tell_what_they_sent(tmp_path, words):
    """Each measures every four steps; who communicates has sent bytes, and the others none."""
    done = run_gpt(2, "--method", *words.split(), cwd=tmp_path)
    assert done.code == 0, done
    records = records_of(tmp_path)
    assert [one["step"] for one in records] == [4, 8, 8]
    assert all(1 < one["perplexity"] < 300 for one in records)
    assert (records[-1]["bytes"] > 0) is (words != "alone")
    assert "moving average" in done.stdout


@pytest.mark.nightly
def test_a_compiled_model_learns_the_same(tmp_path):
    """By inductor, on one rank; beside it the model as it is."""
    if shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    found = []
    for words in ((), ("--compile",)):
        done = run_gpt(1, "--method", "alone", *words, cwd=tmp_path, timeout=300)
        assert done.code == 0, done
        assert any((tmp_path / "compiled").rglob("*.cpp")) is bool(words)
        found.append([one["perplexity"] for one in records_of(tmp_path)])
    assert found[1] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.nightly
def test_averaged_gradients_learn_what_one_process_learns(tmp_path):
    """Four ranks that share each batch make the steps of one process on the whole batch."""
    found = []
    for ranks in (1, 4):
        done = run_gpt(ranks, "--method", "gradient_allreduce", cwd=tmp_path)
        assert done.code == 0, done
        found.append([one["perplexity"] for one in records_of(tmp_path)])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_an_asynchronous_run_ends_by_the_clock(tmp_path):
    """The slow rank makes fewer steps, and the other evaluates without it."""
    words = ["--method", "win_put", "--seconds", "3", "--straggler", "8"]
    done = run_gpt(2, *words, "--evaluate-every", "2", cwd=tmp_path)
    assert done.code == 0, done
    *during, last = records_of(tmp_path)
    fast, slow = last["steps"]
    assert fast > slow > 0
    assert during
    assert 3 <= last["seconds"] < 30


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 1])
def test_it_resumes_on_any_number_of_ranks(tmp_path, ranks):
    """A run that was cut goes on where it was; on as many ranks exactly."""
    words = ["--method", "adapt_then_combine", "--steps", "8"]
    saving = [*words, "--save-every", "4"]
    assert run_gpt(2, *saving, cwd=tmp_path).code == 0
    whole = records_of(tmp_path)
    for folder in (tmp_path / "run").glob("step_*8"):
        folder.rename(tmp_path / "later")
    done = run_gpt(ranks, *words, "--resume", cwd=tmp_path)
    assert done.code == 0, done
    assert "resumed after step 4 of 2 ranks" in done.stdout
    again = records_of(tmp_path)
    if ranks == 2:
        assert [one["perplexity"] for one in again] == [one["perplexity"] for one in whole[1:]]
        assert again[-1]["ema"] == whole[-1]["ema"]
    else:
        assert again[-1]["perplexity"] == pytest.approx(whole[-1]["perplexity"], rel=0.1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--batch", "31"], "--batch: expected a multiple of 2 ranks x 1 accumulated batches"),
        (["--straggler", "0.5"], "argument --straggler: expected at least 1, got 0.5"),
        (["--set", "outer_lr"], "expected NAME=VALUE, got 'outer_lr'"),
        (["--method", "dilocoo"], "diloco"),
    ],
)
def test_wrong_options_are_named(tmp_path, words, says):
    """What is wrong is said, and what was expected."""
    done = run_gpt(2, *words, cwd=tmp_path)
    assert done.code != 0
    assert says in done.stdout + done.stderr


def test_a_file_of_little_text_is_used_or_refused_in_words(tmp_path):
    """One with a single piece of held-out text trains; a shorter one is told how much is needed."""
    file = tmp_path / "text"
    for size, code in ((700, 0), (300, 1)):
        file.write_bytes(b"ab c" * (size // 4))
        words = "--method", "adapt_then_combine", "--length", "32", "--data", str(file)
        done = run_gpt(1, *words, cwd=tmp_path)
        assert done.code == code, done
    assert "argument --data: expected 660 bytes or more" in done.stderr
