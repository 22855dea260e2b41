"""Mistakes and failures: told before training where they can be known, on all ranks, in time."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncddp as bf
from tests.lightning.training import samples, shares, trainer
from tests.support import World, on, run_to_end
from tests.support.processes import environment, mpirun, processes_of, warm_server

pytestmark = pytest.mark.training
BEGUN = "five batches made"


def strategy(*args: Any, **options: Any) -> Any:
    from asyncddp.integrations.lightning import AsyncDDPStrategy

    return AsyncDDPStrategy(*args, **options)


# checkpoints that cannot be written or used


def cannot_write(folder: str) -> list[str]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.lightning.modules import Regression

    told, model = [], Regression()
    kept = ModelCheckpoint("/proc/checkpoints")
    for policy in ("average", "per_rank"):
        with pytest.raises(bf.EnvironmentProblem) as caught:
            trainer(strategy(checkpoint=policy), enable_checkpointing=True, callbacks=[kept]).fit(
                model, shares()
            )
        assert model.trainer.global_step == 0
        told.append(str(caught.value))
    trained = trainer(strategy(checkpoint="per_rank"), max_epochs=1)
    trained.fit(model, shares())
    former = f"{folder}/former.ckpt"
    trained.save_checkpoint(former)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if bf.rank() == 1:  # the disk is full for files of this size
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(bf.EnvironmentProblem) as caught:
            trained.save_checkpoint(f"{folder}/new.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told.append(str(caught.value))
    trainer(strategy(checkpoint="per_rank"), max_epochs=2).fit(
        Regression(), shares(), ckpt_path=former
    )
    with pytest.raises(bf.EnvironmentProblem, match=r"read .*none.ckpt"):
        trainer(strategy()).fit(Regression(), shares(), ckpt_path=f"{folder}/none.ckpt")
    return told


@on("mpi-2")
def test_a_checkpoint_that_cannot_be_written_or_read(world: World, tmp_path: Path) -> None:
    """A read-only folder is told before training, a full disk on all ranks; former ones stay."""
    for before, every, full in world.run(cannot_write, str(tmp_path)):
        for one in (before, every):
            assert "rank 0 cannot write checkpoints to /proc/checkpoints" in one
            assert "give ModelCheckpoint another dirpath" in one
        assert "rank 1 could not write" in full
        assert "new.ckpt: [Errno 27] File too large" in full


def of_another_kind(folder: str) -> str:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from tests.lightning.modules import Regression

    path = f"{folder}/plain{bf.rank()}.ckpt"
    alone = trainer(SingleDeviceStrategy("cpu"), max_epochs=1)
    alone.fit(Regression(), shares())
    alone.save_checkpoint(path)
    with pytest.raises(bf.ArgumentError) as caught:
        trainer(strategy(), max_epochs=2).fit(Regression(), shares(), ckpt_path=path)
    checked = trainer(strategy()).validate(Regression(), shares(), ckpt_path=path, verbose=False)
    assert "error" in checked[0]
    return str(caught.value)


@on("mpi-2")
def test_a_checkpoint_of_another_strategy_is_not_resumed(world: World, tmp_path: Path) -> None:
    """What to do instead is told; validation takes it."""
    for told in world.run(of_another_kind, str(tmp_path)):
        assert "is no checkpoint of AsyncDDPStrategy" in told
        assert "Begin a new run from its weights" in told


# ranks that do different things


def unequal_batches() -> str:
    from tests.lightning.modules import Uneven

    share = torch.utils.data.Subset(samples(), range(16 + 8 * bf.rank()))
    loader = torch.utils.data.DataLoader(share, 4)
    fitted = trainer(strategy(), max_epochs=1, use_distributed_sampler=False)
    with pytest.raises(bf.MismatchError) as caught:
        fitted.fit(Uneven(sync=True), shares(), loader)
    return str(caught.value)


@on("mpi-2")
def test_a_figure_of_unequal_numbers_of_batches(world: World) -> None:
    """The first one that meets another is named, with what to do; no sum mixes two figures."""
    messages = world.run(unequal_batches)
    for message, when in zip(messages, ("an epoch", "a step"), strict=True):
        assert f"'error of {when} in validation_step' (collective" in message
        assert "unequal numbers of batches, log it with on_step=False" in message


# settings that contradict each other


def contradictions() -> list[str]:
    from tests.lightning.modules import Alternating, Regression, Twice

    told = []
    for name, model in (("qadam", Alternating()), ("qadam", Regression()), ("win_put", Twice())):
        with pytest.raises(bf.AsyncDDPError) as caught:
            trainer(strategy(name)).fit(model, shares())
        told.append(str(caught.value))
    return told


@on("mpi-2")
def test_settings_that_do_not_go_together(world: World) -> None:
    """What to change is told."""
    for two, other, twice in world.run(contradictions):
        assert "configure_optimizers gave two optimizers of one parameter" in twice
        assert "qadam trains by one QAdamOptimizer, but configure_optimizers gave 2" in two
        assert "QAdamOptimizer" in other


# ranks that fail

SCRIPT = f"""
import sys
import torch
from lightning import LightningModule, Trainer
from asyncddp.integrations.lightning import AsyncDDPStrategy

class Endless(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        if index == 5 and self.global_rank == 0:
            print({BEGUN!r}, flush=True)
        if index == 8 and self.global_rank == 1 and sys.argv[1] == "raise":
            raise ZeroDivisionError("of rank 1")
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(1024, 4)), 4)
limits = {{"max_epochs": 1}} if sys.argv[1] == "end" else {{"max_epochs": -1}}
trainer = Trainer(strategy=AsyncDDPStrategy(sys.argv[2]), accelerator="cpu", logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, **limits)
trainer.fit(Endless(), loader)
print("ranks:", trainer.world_size, "steps:", trainer.global_step, flush=True)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script that trains without end, or until rank 1 raises an exception."""
    path = tmp_path_factory.mktemp("lightning") / "endless.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.mark.launches
def test_one_process_trains_alone(script: Path) -> None:
    """Without any launcher."""
    done = run_to_end(
        warm_server(frameworks=True).command(str(script), "end", "gradient_allreduce")
    )
    assert done.code == 0, done
    assert "ranks: 1 steps: 256" in done.stdout, done


@pytest.mark.launches
def test_an_exception_on_one_rank_ends_all_under_torchrun(script: Path) -> None:
    """With the exception's own words, and none left."""
    python = warm_server(frameworks=True).python
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = run_to_end(
        [*torchrun, "--no-python", python, str(script), "raise", "adapt_with_combine"]
    )
    assert not done.timed_out, done
    assert done.code != 0, done
    assert BEGUN in done.stdout, done
    assert "ZeroDivisionError: of rank 1" in done.stderr, done
    assert not done.left, done


@pytest.mark.launches
@pytest.mark.mpi(2)
def test_sigterm_ends_all_ranks(script: Path) -> None:
    """The launcher hands it on; Lightning ends the batch under way."""
    command = warm_server(frameworks=True).command(str(script), "end-less", "push_sum")
    process = subprocess.Popen(
        mpirun(2, *command),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if BEGUN in line:
                break
        os.kill(process.pid, signal.SIGTERM)
        began = time.monotonic()
        rest, _ = process.communicate(timeout=60)
        assert process.returncode != 0, (seen, rest)
        assert time.monotonic() - began < 30, (seen, rest)
        until_gone = time.monotonic() + 5
        while processes_of(process.pid) and time.monotonic() < until_gone:
            time.sleep(0.05)
        assert not processes_of(process.pid)
    finally:
        for one in processes_of(process.pid):
            one.kill()
