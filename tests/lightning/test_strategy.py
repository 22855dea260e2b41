"""AsyncDDPStrategy on real ranks: every method fits, validates and resumes, as the wrapper does."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncddp as bf
from tests.support import World, on

pytest.importorskip("lightning", reason="the package lightning is not installed")
warnings.simplefilter("ignore")  # Lightning's hints about workers and loggers
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("adapt_then_combine", {}),
    ("adapt_with_combine", {}),
    ("async_model_average", {}),
    ("async_model_average", {"sync_interval_ms": 5}),
    ("bytegrad", {}),
    ("choco_sgd", {"compression": "top_k"}),
    ("decentralized", {}),
    ("gradient_allreduce", {}),
    ("low_precision_decentralized", {}),
    ("pull_get", {}),
    ("push_sum", {}),
    ("qadam", {}),
    ("win_put", {}),
]
pytestmark = pytest.mark.training


def samples() -> torch.utils.data.TensorDataset:
    """The same data on all ranks."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def shares(batch: int = 4) -> torch.utils.data.DataLoader[Any]:
    """Batches of this rank's share, in order."""
    data = samples()
    sampler = torch.utils.data.DistributedSampler(data, bf.size(), bf.rank(), shuffle=False)
    return torch.utils.data.DataLoader(data, batch, sampler=sampler)


def network() -> torch.nn.Module:
    """The same model on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def module(algorithm: str = "", *, by_hand: bool = False) -> Any:
    """A LightningModule of the network."""
    from lightning.pytorch import LightningModule

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = network(), not by_hand

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            if by_hand:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("error", loss, sync_dist=True)

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            if algorithm == "qadam":
                return bf.QAdamOptimizer(self.parameters(), lr=0.01, warmup_steps=3)
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]

    return Regression()


def trainer(strategy: Any, **options: Any) -> Any:
    """A quiet Trainer."""
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    chosen = {"accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False, **quiet}
    return Trainer(strategy=strategy, **{**chosen, **options})


def fits_and_resumes(folder: str) -> None:
    """Each method, with one policy of checkpoints or the other."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    from asyncddp.integrations.lightning import AsyncDDPStrategy

    for number, (algorithm, options) in enumerate(METHODS):
        there = f"{folder}/{number}"
        policy = ("average", "per_rank")[number % 2]
        validate = ("average", "local")[number % 2]

        def make(epochs: int) -> Any:
            kept = ModelCheckpoint(there, monitor="error", save_last=True)  # noqa: B023
            return trainer(
                AsyncDDPStrategy(algorithm, checkpoint=policy, validate=validate, **options),  # noqa: B023
                max_epochs=epochs,
                enable_checkpointing=True,
                callbacks=[kept, EarlyStopping("error", patience=9)],
            )

        first = make(1)
        first.fit(module(algorithm), shares(), shares())
        assert first.world_size == bf.size()
        second = make(2)
        second.fit(module(algorithm), shares(), shares(), ckpt_path=f"{there}/last.ckpt")
        batches = len(shares())
        assert second.global_step == 2 * batches, algorithm
        assert second.strategy.distributed_optimizers[0].steps == 2 * batches, algorithm
        own = second.callback_metrics["error"]
        torch.testing.assert_close(bf.allreduce(own), own)
        second.test(second.lightning_module, shares(), verbose=False)


def train_by_wrapper(algorithm: str, merged: int, clip: float | None) -> torch.nn.Module:
    """Train as the Trainer does, by DistributedOptimizer alone."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = bf.DistributedOptimizer(optimizer, model, algorithm)
    for _ in range(2):
        for x, y in shares(4 * merged):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model


def follows_the_wrapper() -> None:
    """Automatic and manual optimisation, accumulation and clipping."""
    from asyncddp.integrations.lightning import AsyncDDPStrategy

    same = ["adapt_then_combine", "adapt_with_combine", "bytegrad", "decentralized"]
    for algorithm in [*same, "gradient_allreduce"]:
        for by_hand, merged, clip in ((False, 1, None), (True, 1, None), (False, 2, 0.5)):
            model = module(by_hand=by_hand)
            trained = trainer(
                AsyncDDPStrategy(algorithm),
                accumulate_grad_batches=merged,
                gradient_clip_val=clip,
                use_distributed_sampler=False,
            )
            trained.fit(model, shares())
            expected = train_by_wrapper(algorithm, merged, clip).state_dict()
            torch.testing.assert_close(model.net.state_dict(), expected, rtol=0, atol=1e-6)


def mistakes() -> list[str]:
    """What the user is told."""
    from asyncddp.integrations.lightning import AsyncDDPStrategy

    told = []
    for strategy, flags in (
        ("asyncddp", {"devices": 8}),
        ("asyncddp_bytegrad", {"sync_batchnorm": True}),
        ("asyncddp", {"num_nodes": 3}),
    ):
        with pytest.raises(bf.ArgumentError) as caught:
            trainer(strategy, **flags)
        told.append(str(caught.value))
    for arguments in ({"algorithm": "bytgrad"}, {"checkpoint": "mean"}):
        with pytest.raises(bf.ArgumentError) as caught:
            AsyncDDPStrategy(**arguments)
        told.append(str(caught.value))
    return told


@on("mpi-2", "mpi-4")
def test_every_method_fits_validates_and_resumes(world: World, tmp_path: Path) -> None:
    """Steps are counted on, reduced metrics are equal on all ranks."""
    world.run(fits_and_resumes, str(tmp_path))


@on("mpi-2", "mpi-4")
def test_the_trajectory_is_the_optimizer_wrapper_s(world: World) -> None:
    """Parameters of each rank agree to 1e-6 after two epochs."""
    world.run(follows_the_wrapper)


@on("mpi-2")
def test_a_contradiction_is_told_with_both_numbers(world: World) -> None:
    """Before training, on each rank."""
    told = world.run(mistakes)[0]
    assert "got 8" in told[0]
    assert "2 of the world's 2 ranks" in told[0]
    assert "process_group_backend" in told[1]
    assert "got 3" in told[2]
    assert "Did you mean 'bytegrad'" in told[3]
    assert "'per_rank', got 'mean'" in told[4]


def callbacks_and_bagua(folder: str) -> None:
    """A switch in mid-fit that a resumed run makes again, a monitor, and Bagua's names."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from asyncddp.integrations.bagua import BaguaStrategy
    from asyncddp.integrations.lightning import (
        AsyncDDPStrategy,
        ConsensusMonitor,
        SwitchAlgorithm,
    )

    def make(epochs: int) -> Any:
        switch = SwitchAlgorithm({1: ("decentralized", {"peer_selection_mode": "shift_one"})})
        kept = ModelCheckpoint(folder, save_last=True)
        return trainer(
            AsyncDDPStrategy("gradient_allreduce"),
            max_epochs=epochs,
            enable_checkpointing=True,
            logger=CSVLogger(folder, version=0) if bf.rank() == 0 else False,
            callbacks=[kept, switch, ConsensusMonitor(every=2)],
        )

    first = make(2)
    first.fit(module(), shares())
    assert first.strategy.optimizers[0].algorithm == "decentralized"
    second = make(3)
    second.fit(module(), shares(), ckpt_path=f"{folder}/last.ckpt")
    assert second.strategy.optimizers[0].algorithm == "decentralized"
    for name in ("gradient_allreduce", "bytegrad", "decentralized", "async", "qadam"):
        trained = trainer(BaguaStrategy(algorithm=name), max_epochs=1)
        trained.fit(module(name), shares())
    trainer("bagua", max_epochs=1).fit(module(), shares())


@on("mpi-2")
def test_callbacks_switch_and_watch_and_bagua_s_names_train(world: World, tmp_path: Path) -> None:
    """Also after a resume."""
    world.run(callbacks_and_bagua, str(tmp_path))
