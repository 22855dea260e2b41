"""scripts/bench elastic kills ranks and says what that costs the others, beside who restarts."""

from __future__ import annotations

import json
import os
import random
import sys
import time

import pytest

from tests.support.processes import REPO, run_to_end, warm_python

SCRIPTS = str(REPO / "scripts")
PATH = os.pathsep.join((SCRIPTS, str(REPO)))
PNG = b"\x89PNG\r\n\x1a\n"

# a rank without torch, whose era is the number of ranks that are gone; it is late after a death by
# a part of a second for its number, and ends as the last argument says
STEPPING = """
import os, pathlib, struct, sys, time
folder, rank, ranks, ends = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
def lives(path):
    stat = pathlib.Path("/proc", path.name.partition("-")[2], "stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
era, made, end = 0, 0, None
with (folder / f"{rank}-{os.getpid()}").open("wb", buffering=0) as log:
    while made != end:
        time.sleep(0.01)
        gone = len([path for path in folder.glob("*-*") if not lives(path)])
        time.sleep(0.2 * rank * (gone > era))
        era = gone
        log.write(struct.pack("3d", time.monotonic(), time.process_time(), era))
        made += 1
        if end is None and (folder / "end").exists():
            end = int((folder / "end").read_text()) - (ends == 7)
sys.exit(ends)
"""


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


def stepping(*ends):
    """A run of ranks that end with these exit codes."""
    from benchmarks.elastic.killed_runs import Launch

    words = [sys.executable, "-c", STEPPING, "{folder}"]
    ranks = str(len(ends))
    commands = [[*words, str(rank), ranks, str(code)] for rank, code in enumerate(ends)]
    return Launch(len(ends), commands)


def test_a_kill_lasts_until_the_last_of_the_others_has_stepped_in_the_era_after_it():
    """Of ranks 1 and 2 the latter takes 0.4 s to see a death; what it steps before is none."""
    from benchmarks.elastic.killed_runs import killed_run, read_steps

    with killed_run(stepping(0, 0, 0)) as run:
        before = time.monotonic()
        run.kill(0)
        later = [read_steps(path) for path in run.logs.values()]
        (kill,) = run.kills
        ends = [float(steps[steps[:, 2] == 1][0, 0]) for steps in later]
        assert kill.rank == 0
        assert set(run.logs) == {1, 2}
        assert 0.4 <= kill.seconds <= max(ends) - before
        run.kill(1)
        assert set(run.logs) == {2}


def test_a_run_that_loses_a_step_or_fails_is_told():
    """Rank 1 ends with 7, a step too early; of the rank that was killed nothing is wanted."""
    from benchmarks.elastic.killed_runs import killed_run

    with killed_run(stepping(0, 7, 0)) as run:
        run.kill(2)
        wrong = run.finish()
    (steps,) = [line for line in wrong if line.startswith("rank")]
    made, wanted = (int(word) for word in steps.split() if word.isdigit() and word != "1")
    assert steps.startswith(f"rank 1 made {made} of {wanted} ")
    assert made == wanted - 1
    assert sorted(wrong) == ["ended with -9", "ended with 7", steps]


def test_ranks_that_do_not_step_again_end_the_bench_with_their_last_words(monkeypatch):
    """The error names the rank that was killed, long before all of them would have ended."""
    from benchmarks.elastic import killed_runs
    from benchmarks.ranks import RunFailedError

    stuck = STEPPING.replace("time.sleep(0.2 * rank * (gone > era))", "gone and time.sleep(99)")
    launch = killed_runs.Launch(
        2,
        [[sys.executable, "-c", stuck, "{folder}", rank, "2", "0"] for rank in "01"],
    )
    with killed_runs.killed_run(launch) as run:
        monkeypatch.setattr(killed_runs, "_LIMIT", 1.0)
        with pytest.raises(RunFailedError, match="no further step after its rank 1 was killed"):
            run.kill(1)


def test_others_of_an_elastic_run_lose_no_step_when_rank_0_is_killed(monkeypatch):
    """They end with exit code 0, each after the same number of steps."""
    from benchmarks.elastic.killed_runs import elastic_launch, killed_run
    from benchmarks.elastic.rank_loops import NEIGHBORS

    monkeypatch.setattr(sys, "executable", warm_python())
    with killed_run(elastic_launch(NEIGHBORS, 3)) as run:
        run.kill(0)
        assert run.finish() == []
        assert set(run.logs) == {1, 2}


def test_kills_have_their_percentiles_and_aim_in_a_line():
    """p95 is judged, rank 0 has its own median, and a run that stood still misses the aim."""
    from benchmarks.elastic.bench import Killed
    from benchmarks.elastic.killed_runs import Kill

    kills = [Kill(rank, seconds) for rank, seconds in ((0, 0.01), (1, 0.02), (2, 0.03), (0, 0.05))]
    found = Killed("who", stepping(*[0] * 6), 4, kills, [0.001, 0.002, 0.009], runs=1)
    line = found.line(judged=True)
    told = ("2 ms", "25 ms", "47 ms", "50 ms", "30 ms")
    assert line.cells == ("who", "6 → 2", "4", "0 of 1", *told)
    assert (line.aim, line.met) == ("p95 ≤ 300 ms, none fails", True)
    assert found.line(judged=False).aim is None
    assert found.row().seconds == [0.01, 0.02, 0.03, 0.05]
    found.failed = 1
    assert found.line(judged=True).met is False
    found.failed, found.kills = 0, [Kill(1, 0.4)]
    assert found.line(judged=True).met is False


def test_a_run_that_fails_is_told_of_and_others_are_made():
    """Rank 1 ends a step too early in each run; each kill before counts."""
    from benchmarks.elastic.bench import MeasuredRuns

    bench = MeasuredRuns(lambda text: None)
    found = bench.kill("who", stepping(0, 7, 0), 2, 1, ends=True)
    assert (found.runs, found.failed) == (2, 2)
    assert [kill.rank for kill in found.kills] == [0, 0]
    assert len(bench.failures) == 2
    assert all(told.startswith("who: ") and "of" in told for told in bench.failures)


def test_what_elastic_costs_is_the_median_of_the_rounds_ratios():
    """Rounds that were slow for both do not count against it."""
    from benchmarks.elastic.overhead import overhead_lines
    from benchmarks.tables import TimingRow

    off, on = (1e-3, 9e-3, 1e-3), (1.01e-3, 9e-3, 2e-3)
    rounds = {"off, MPI and shared_memory": off, "off, c10d": off, "on, c10d": on}
    rows = [TimingRow("elastic_allreduce", who, 4, 1, one) for who, one in rounds.items()]
    (line,) = overhead_lines(rows)
    assert (line.cells[0], line.cells[-1]) == ("allreduce, 4 B", "1.010 ±0.250")
    assert (line.aim, line.met) == ("≤ 1.02 x off", True)


def test_moments_of_kills_lie_within_the_run():
    """There is at least one, there are never too many, and they ascend."""
    from benchmarks.elastic.bench import poisson_moments

    drawn = [poisson_moments(random.Random(seed), 10.0, 4) for seed in range(200)]
    assert {2, 3, 4} <= {len(moments) for moments in drawn} <= {1, 2, 3, 4}
    assert all(moments == sorted(moments) and moments[-1] < 10 for moments in drawn)


@pytest.mark.nightly  # makes an environment
def test_where_torchft_cannot_be_installed_the_reason_is_told(monkeypatch, tmp_path):
    """Pip's last line says it; the environment is beside that of the bench."""
    from benchmarks.elastic.rivals import torchft_python
    from benchmarks.tables import RivalUnavailableError

    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(RivalUnavailableError, match=r"pip install .* failed: ERROR: No matching"):
        torchft_python()
    assert (tmp_path / "venv-torchft").is_dir()


@pytest.mark.nightly
@pytest.mark.mpi(2)
@pytest.mark.launches
def test_quick_run_prints_all_tables_and_writes_json_and_plot(tmp_path):
    """Each loop has its kills, torch elastic is beside it, and torchft is named as not measured."""
    command = [sys.executable, "-m", "benchmarks", "elastic", "--quick"]
    command += ["--json", "out.json", "--plot", "out.png"]
    done = run_to_end(command, cwd=tmp_path, environ={"PYTHONPATH": PATH})
    assert done.code == 0, done
    assert "torchft was not measured: it is with --with-torchft" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    kills, overhead, kept = found["sheets"]
    assert [line["cells"][:4] for line in kills["lines"]] == [
        ["neighbor_allreduce, 1 MB", "4 → 2", "2", "0 of 1"],
        ["training, gradient_allreduce", "4 → 2", "2", "0 of 1"],
        ["training, adapt_then_combine", "4 → 2", "2", "0 of 1"],
        ["torch elastic", "4", "2", "0 of 1"],
    ]
    assert [line["aim"] for line in kills["lines"]] == [*["p95 ≤ 300 ms, none fails"] * 3, None]
    assert len(overhead["lines"]) == 5
    assert len(kept["lines"]) == 1
    timed = [row for row in found["results"] if row["table"] == "elastic_kills"]
    assert [len(row["rounds"]) for row in timed] == [2, 2, 2, 2]
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)
