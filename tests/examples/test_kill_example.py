"""examples/kill.py: a rank of four is killed, another process takes its place, all train on."""

from __future__ import annotations

import itertools
import re
import sys

from tests.support.processes import REPO, run_to_end, warm_script

SCRIPT = str(REPO / "examples" / "kill.py")


def test_the_table_shows_who_took_part_and_nobody_stopped(tmp_path):
    """Four ranks, three and four again; the run succeeds, and the picture is drawn."""
    picture = tmp_path / "kill.png"
    start = (sys.executable, "-m", "asyncddp", "run", "--elastic", "--restarts", "1", "-np", "4")
    done = run_to_end([*start, *warm_script(SCRIPT, "--smoke", "--out", str(picture))])
    assert done.code == 0, done
    rows = re.findall(r"(\d+) to (\d+) +│ (\d) ", done.stdout)
    assert [int(members) for _, _, members in rows] == [4, 3, 4], done
    for (_, last, _), (first, _, _) in itertools.pairwise(rows):
        assert int(first) == int(last) + 1
    assert re.search(r"rank 2: a new process goes on with step \d+\n", done.stdout), done
    assert "rank 2 was killed by SIGKILL, and was replaced" in done.stderr, done
    assert picture.stat().st_size > 0
