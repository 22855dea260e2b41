"""Warm ranks: forked of a process that has torch loaded, otherwise as in ``python script.py``."""

from __future__ import annotations

import time

import pytest

from tests.support import run_on_mpirun, run_to_end
from tests.support.processes import warm_server


def test_a_warm_rank_has_its_own_arguments_environment_folder_and_main(tmp_path):
    """What a script sees of itself is what it sees in a Python of its own."""
    script = """
import os, sys, __main__
print(sys.argv == [__file__], os.environ["GIVEN"], "OMPI_COMM_WORLD_RANK" in os.environ)
print(__name__, __main__.__file__ == __file__, sys.path[0] == os.path.dirname(__file__))
print(sorted(name for name in globals() if not name.startswith("__")))
"""
    for warm in (True, False):
        done = run_on_mpirun(1, script, tmp_path, environ={"GIVEN": "value"}, warm=warm)
        assert done.stdout.splitlines() == [
            "True value True",
            "__main__ True True",
            "['os', 'sys']",
        ], done


def test_a_warm_rank_has_torch_before_it_imports_it(tmp_path):
    """And MPI has not begun."""
    script = "import sys; print('torch' in sys.modules, 'mpi4py.MPI' in sys.modules)"
    assert run_on_mpirun(1, script, tmp_path).stdout == "True False\n"


@pytest.mark.exhaustive
def test_a_rank_with_frameworks_has_them_and_they_know_its_rank():
    """Lightning reads it of the environment when it is imported."""
    pytest.importorskip("lightning_utilities", reason="the package lightning is not installed")
    script = "import sys; print('lightning.pytorch' in sys.modules, 'sklearn' in sys.modules)\n"
    script += "import lightning.pytorch as pl; print(pl.utilities.rank_zero.rank_zero_only.rank)"
    for rank in ("0", "3"):
        command = warm_server(frameworks=True).command("-c", script)
        done = run_to_end(command, environ={"LOCAL_RANK": rank})
        assert (done.stdout, done.left) == (f"True True\n{rank}\n", ()), done
    assert "False" in run_to_end(warm_server().command("-c", script)).stdout


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_a_rank_that_is_killed_is_told_by_the_launcher(tmp_path, warm):
    """The small program ends by the signal that ended its process."""
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    done = run_on_mpirun(1, script, tmp_path, warm=warm)
    assert done.code == 128 + 9, done
    assert "signal 9" in done.stderr, done


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_ranks_end_with_their_run(tmp_path, warm):
    """A launcher that ends one rank for another's fault ends its process too."""
    script = """
import os, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    sys.exit(3)
time.sleep(60)
"""
    begun = time.monotonic()
    done = run_on_mpirun(2, script, tmp_path, warm=warm)
    assert (done.code, done.left) == (3, ()), done
    assert time.monotonic() < begun + 55


def test_a_process_that_outlives_a_warm_rank_is_told(tmp_path):
    """Also where the launcher has lost sight of it."""
    script = """
import subprocess
silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
subprocess.Popen(["sleep", "30"], **silent)
"""
    done = run_on_mpirun(1, script, tmp_path)
    assert [line.partition(": ")[2] for line in done.left] == ["sleep 30"], done


def test_a_warm_rank_runs_the_customization_on_its_path(tmp_path):
    """``sitecustomize`` in a folder of PYTHONPATH runs first, in the rank's own environment."""
    text = 'import os; os.environ["MADE"] = os.environ["OMPI_COMM_WORLD_RANK"] + " of a site"'
    (tmp_path / "sitecustomize.py").write_text(text, encoding="utf-8")
    for warm in (True, False):
        script = "import os; print(os.environ['MADE'])"
        done = run_on_mpirun(1, script, tmp_path, environ={"PYTHONPATH": str(tmp_path)}, warm=warm)
        assert done.stdout == "0 of a site\n", done
