"""Ranks under a real Slurm of one node: by mpirun, by srun, and by the batch scripts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import warm_python, warm_server

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = REPO / "examples" / "slurm"
RANKS = [f"rank {rank} of 2, {rank} of 2 here, mean 0.5" for rank in range(2)]


def lines(text):
    return sorted(line for line in text.splitlines() if line.startswith("rank "))


def test_srun_with_pmix_starts_ranks_that_know_each_other(pmix):
    """Two tasks of srun --mpi=pmix are ranks 0 and 1 of one world."""
    done = pmix.pmix_step(2, sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == RANKS


def test_torch_distributed_meets_under_srun_with_no_variable_set(pmix):
    """env:// finds rank and size in Slurm's variables, and the address of the store by MPI."""
    text = (
        "import torch, torch.distributed as dist\n"
        "import asyncddp.integrations.torch_distributed\n"
        "dist.init_process_group('asyncddp')\n"
        "x = torch.tensor([1.0 + dist.get_rank()])\n"
        "dist.all_reduce(x)\n"
        "print('rank', dist.get_rank(), 'sum', x.item())\n"
        "dist.destroy_process_group()\n"
    )
    (pmix.folder / "backend.py").write_text(text)
    done = pmix.pmix_step(2, warm_server().python, "backend.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 sum 3.0", "rank 1 sum 3.0"]


def test_srun_without_it_is_refused_and_not_trained_apart(slurm):
    """Both would be rank 0 of 1, and each would train a model of its own."""
    done = slurm.call("srun", "--ntasks=2", "--mpi=none", warm_server().python, "train.py")
    assert done.returncode != 0
    assert not lines(done.stdout)
    assert "srun has started this process as rank 0 of 2, but the MPI library says" in done.stderr
    assert "srun --mpi=pmix" in done.stderr


def test_asyncddp_run_reads_the_number_of_ranks_from_the_allocation(slurm):
    """In salloc, asyncddp run without -np starts as many ranks as there are tasks."""
    words = [warm_python(), "-m", "asyncddp", "run", "train.py"]
    done = slurm.call("salloc", "--quiet", "--ntasks=2", *words)
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == RANKS


def test_a_failing_rank_under_srun_is_named_with_its_exit_code(pmix):
    """With --launcher srun, asyncddp run names the failed rank and exits with its code."""
    (pmix.folder / "fails.py").write_text(
        "import asyncddp as bf, sys\nbf.init()\nbf.rank() or sys.exit(7)\nbf.barrier()\n"
    )
    run = [warm_python(), "-m", "asyncddp", "run", "--launcher", "srun", "--mpi-args=--mpi=pmix"]
    done = pmix.call("salloc", "--quiet", "--ntasks=2", *run, "fails.py")
    assert done.returncode == 7
    assert "asyncddp run: rank 0" in done.stderr
    assert "ended with exit code 7" in done.stderr


@pytest.mark.parametrize("name", ["cpu.sh", "srun.sh"])
def test_the_batch_scripts_train(name, request):
    """cpu.sh and srun.sh run the script on as many ranks as sbatch was asked for."""
    slurm = request.getfixturevalue("pmix" if name == "srun.sh" else "slurm")
    small = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1"]
    place = str(Path(warm_server().commands).parent)
    code, said = slurm.submit(name, *small, str(EXAMPLES / name), "train.py", VENV=place)
    assert code == 0, said
    assert lines(said) == RANKS, f"{said!r}\n{slurm.log('slurmd')}"


def test_a_batch_script_without_a_program_says_how_it_is_used(slurm):
    """Without a program the job fails, and its output holds the usage line of cpu.sh."""
    small = ["--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1"]
    code, said = slurm.submit("usage", *small, str(EXAMPLES / "cpu.sh"), VENV=sys.prefix)
    assert code != 0
    assert "usage: sbatch examples/slurm/cpu.sh train.py" in said


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (["--gpus-per-node=2"], {"0 sees 0,1", "1 sees 0,1"}),
        (["--gpus-per-task=1"], {"0 sees 0", "1 sees 1"}),
        (["--gpus-per-node=2", "--gpu-bind=single:1"], {"0 sees 0", "1 sees 1"}),
    ],
    ids=["per-node", "per-task", "bind"],
)
def test_which_gpus_a_task_sees_is_as_the_guide_says(slurm, options, seen):
    """docs/guides/slurm.md tells what CUDA_VISIBLE_DEVICES holds for each way to ask for GPUs."""
    show = 'echo "$SLURM_PROCID sees $CUDA_VISIBLE_DEVICES"'
    done = slurm.call("srun", "--ntasks=2", *options, "bash", "-c", show)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == seen


def test_ranks_of_mpirun_see_all_gpus_of_the_batch_step(slurm):
    """--gpus-per-task binds tasks of srun; mpirun's ranks have what the batch script has."""
    script = (
        "#!/bin/bash\n"
        f"{sys.executable} -m asyncddp run -np 2 bash -c "
        "'echo \"$OMPI_COMM_WORLD_RANK sees $CUDA_VISIBLE_DEVICES\"'\n"
    )
    (slurm.folder / "seen.sh").write_text(script)
    code, said = slurm.submit("seen", "--ntasks=2", "--gpus-per-task=1", "seen.sh")
    assert code == 0, said
    assert sorted(said.splitlines()) == ["0 sees 0,1", "1 sees 0,1"]


SAVING = """
import os, signal, sys, time
asked = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: asked.append(number))
sys.stdout.write("ready\\n")
while signal.SIGTERM not in asked:
    time.sleep(0.05)
time.sleep(3)
sys.stdout.write(f"saved {sorted(map(int, asked))}\\n")
"""


def test_ranks_of_srun_get_signals_and_have_time_to_save(slurm):
    """Though srun itself kills its tasks when it gets SIGTERM."""
    (slurm.folder / "saving.py").write_text(SAVING)
    words = ["-m", "asyncddp", "run", "--launcher", "srun", "-np", "2", "saving.py"]
    with subprocess.Popen(
        [sys.executable, *words],
        env=slurm.environment,
        cwd=slurm.folder,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert [child.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        for number in (signal.SIGUSR1, signal.SIGTERM):
            child.send_signal(number)
            time.sleep(0.2)
        assert child.stdout.read().splitlines() == ["saved [10, 15]"] * 2
        assert child.wait(timeout=120) == 0
