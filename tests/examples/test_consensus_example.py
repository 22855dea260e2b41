"""examples/consensus.py: the error over rounds that theory predicts, and a sum that is kept."""

from __future__ import annotations

import re
import sys

import pytest

from tests.examples.test_digits import table_of
from tests.support.processes import REPO, Finished, run_to_end, warm_script, warm_server

SCRIPT = str(REPO / "examples" / "consensus.py")


def run_consensus(ranks: int, *options: str) -> Finished:
    start = (sys.executable, "-m", "asyncddp", "run", "-np", str(ranks))
    return run_to_end([*start, *warm_script(SCRIPT, *options)])


@pytest.mark.mpi(4)
def test_rounds_shrink_the_error_as_predicted():
    """On four ranks the rate is that of theory, and one peer a round is exact after two rounds."""
    names = ("ring", "star", "one_peer_exponential")
    done = run_consensus(4, "--topology", *names, "--rounds", "12")
    assert done.code == 0, done
    table = table_of(done)
    assert table["ring"] == ["2", "0.333", "0.333", "1.9e-06", "never"], done
    assert table["star"][1] == table["star"][2] == "0.750"
    assert table["one_peer_exponential"][:3] == ["1", "0.000", "0.000"]
    assert table["one_peer_exponential"][4] == "2 rounds"
    assert "Nearest to the average: one_peer_exponential, error " in done.stdout


@pytest.mark.mpi(2)
def test_nobody_waits_and_the_sum_is_kept():
    """Shares in flight belong to somebody: neither the sum nor the mean weight changes."""
    done = run_consensus(2, "--asynchronous", "--smoke", "--topology", "ring")
    assert done.code == 0, done
    told = re.search(r"error 1 -> (\S+), .*sum changed by (\S+), mean p (\S+)\n", done.stdout)
    assert told, done
    error, drift, weight = map(float, told.groups())
    assert error < 1
    assert drift < 1e-13
    assert weight == pytest.approx(1, abs=1e-12)


def test_a_graph_that_cannot_be_of_so_many_ranks_is_named():
    """The error says what the graph needs and which one would do."""
    command = warm_server().command(SCRIPT, "--ranks", "3", "--topology", "hypercube")
    done = run_to_end(command)
    assert done.code != 0
    assert "hypercube needs n to be a power of two, got n=3" in done.stderr
