"""examples/digits.py: who waits for the slow rank, and how soon each method has learnt."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPO, Finished, run_to_end, warm_script, warm_server

SCRIPT = str(REPO / "examples" / "digits.py")
PARAMETERS = 64 * 64 + 64 + 64 * 10 + 10
ASYNCDDP = (sys.executable, "-m", "asyncddp")


def run_digits(
    ranks: int, *options: str, cwd: Path, timeout: float = 200, run: tuple[str, ...] = ()
) -> Finished:
    if ranks == 1:
        return run_to_end(warm_server().command(SCRIPT, *options), cwd=cwd, timeout=timeout)
    command = [
        *ASYNCDDP,
        "run",
        "-np",
        str(ranks),
        *run,
        *warm_script(SCRIPT, *options, frameworks=True),
    ]
    return run_to_end(command, cwd=cwd, timeout=timeout)


def table_of(done: Finished) -> dict[str, list[str]]:
    """The rows of the printed table: first cell → the others."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout)
    rows = [re.split(r"[│┃]", line)[1:-1] for line in text.splitlines() if line[:1] in "│┃"]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows if cells}


def number(cell: str) -> float:
    return float(re.sub(r"[ %B,]", "", cell))


def sentence_of(done: Finished) -> str:
    """The line before the last, which says what the run has shown."""
    return done.stdout.splitlines()[-2]


def check_sentence(done: Finished) -> None:
    """All figures of the sentence are those of the table, and what follows from them."""
    table, sentence = table_of(done), sentence_of(done)
    (row,) = (row for row in table if row.startswith("seconds to "))
    target = row.removeprefix("seconds to ")
    assert f" times slower, the average model reaches {target} accuracy " in sentence
    moments = dict(zip(table[""], table[row], strict=True))
    for name, moment in moments.items():
        told = re.search(rf"(not within \d+ s|after [\d.]+ s) with {re.escape(name)}", sentence)
        assert told, done
        assert told[1].startswith("not within" if moment == "never" else f"after {moment} s")
    first, *_ = table[""]
    known = {name: float(moment) for name, moment in moments.items() if moment != "never"}
    best = min(known, key=lambda name: known[name], default=first)
    if not known:
        assert sentence.count(":") == 0, done
    elif known[best] == known.get(first):
        assert sentence.endswith(f": none is faster than {first}."), done
    else:
        rates = dict(zip(table[""], table["steps per second"], strict=True))
        words = f"at {rates[best]} steps per second instead of {rates[first]}."
        times = "first"
        if first in known:
            times = f"{known[first] / known[best]:.1f} times as fast as {first}"
        assert sentence.endswith(f": {best} is {times}, {words}"), done


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run on 4 ranks with a timeline, and the folder it ran in: long enough to learn."""
    folder = tmp_path_factory.mktemp("whole")
    return run_digits(4, "--seconds", "9", cwd=folder, run=("--timeline", "out")), folder


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.mpi(4)
class TestWholeRunOnFourRanks:
    def test_ends_well_and_leaves_no_process(self, whole):
        """A run on four ranks exits with 0, and no process outlives it."""
        done, _ = whole
        assert done.code == 0, done
        assert not done.left

    def test_all_learn_and_who_does_not_wait_makes_many_more_steps(self, whole):
        """All methods learn the digits, and the ranks that do not wait make many more steps."""
        table = table_of(whole[0])
        assert all(number(cell) > 93 for cell in table["accuracy at the end"])
        ddp, _, free = map(number, table["steps per second"])
        assert free > 2 * ddp

    def test_sentence_has_the_figures_of_this_run(self, whole):
        """The sentence holds the table's figures and the target of 95 %."""
        check_sentence(whole[0])
        assert "reaches 95 % accuracy after" in sentence_of(whole[0])

    def test_timeline_is_merged_and_reported(self, whole):
        """Two commands more show what happened in it: steps, messages, and who waited for whom."""
        trace, folder = "t.json", whole[1]
        for command in (
            ("merge", "out", "-o", trace),
            ("report", trace, "--skip", "0", "--json", "r.json", "--plot", "r.png"),
        ):
            done = run_to_end([*ASYNCDDP, "timeline", *command], cwd=folder)
            assert done.code == 0, done
        events = json.loads((folder / trace).read_text())
        assert {event["pid"] for event in events} == set(range(4))
        assert min(event["ts"] for event in events if "ts" in event) >= 0
        found = json.loads((folder / "r.json").read_text())
        for rank in found["ranks"]:
            assert rank["steps"] > 45  # of adapt_then_combine, and some of win_put
            assert min(rank["compute"], rank["exposed"]) > 0
        assert (folder / "r.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert "Waited for most: rank " in done.stdout


@pytest.mark.mpi(2)
def test_nobody_waits_in_windows_and_a_target_never_reached_is_said_to_be(tmp_path):
    """No figure is invented where there is none; the picture's kind is that of its name.

    The slow rank takes 0.4 s for a step, which no load of a machine makes of a step elsewhere.
    """
    options = ("--smoke", "--slower", "200", "--methods", "gradient_allreduce", "win_put")
    more = ("--target", "100", "--split", "digits", "--out", "p.svg")
    done = run_digits(2, *options, *more, cwd=tmp_path)
    assert done.code == 0, done
    check_sentence(done)
    table = table_of(done)
    assert table["seconds to 100 %"] == ["never", "never"]
    assert number(table["steps per second"][1]) > number(table["… of the slow rank"][1])
    assert re.search(r"not within \d+ s with gradient_allreduce, not within", sentence_of(done))
    assert "100 % accuracy not within" in (tmp_path / "p.svg").read_text(encoding="utf-8")


def test_one_rank_has_nobody_to_wait_for(tmp_path):
    """On one rank the example exits with 1 and says how to start four."""
    done = run_digits(1, "--smoke", cwd=tmp_path)
    assert done.code == 1, done
    assert done.stderr == (
        "digits.py: one rank has nobody to wait for; asyncddp run -np 4 starts four\n"
    )
