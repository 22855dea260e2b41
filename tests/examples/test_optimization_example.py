"""examples/optimization.py: the bias of diffusion, and methods without one."""

from __future__ import annotations

import sys

import pytest

from asyncddp.algorithms import ALGORITHMS
from tests.examples.test_digits import table_of
from tests.support.processes import REPO, run_to_end, warm_script

SCRIPT = str(REPO / "examples" / "optimization.py")


@pytest.mark.slow
@pytest.mark.mpi(4)
def test_exact_methods_reach_the_optimum_and_diffusion_does_not():
    """The distance in the end is as each method declares, and half the rate halves the bias."""
    options = ("--problem", "logistic", "--steps", "200")
    start = (sys.executable, "-m", "asyncddp", "run", "-np", "4")
    done = run_to_end([*start, *warm_script(SCRIPT, *options)])
    assert done.code == 0, done
    rows = {name: cells for name, cells in table_of(done).items() if name}
    assert len(rows) == 6
    for name, cells in rows.items():
        exact = ALGORITHMS[name.split(",")[0]].exact
        assert cells[-1] == ("exact" if exact else "biased")
        assert (float(cells[2]) < 1e-5) is exact, done
        assert (float(cells[2]) > 1e-2) is not exact, done
    whole, half, *_ = (float(cells[2]) for cells in rows.values())
    assert whole / half == pytest.approx(2, rel=0.15)
