"""Both packages of Lightning have the strategies and callbacks, each for its own classes."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncddp as bf
from tests.lightning.training import network, shares
from tests.support import World, on

pytestmark = pytest.mark.training
TRAINERS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
FABRICS = {"lightning.fabric": "lightning.fabric", "lightning_fabric": "lightning_fabric"}


def module(base: type[Any], optimizer: str) -> Any:
    """A module of the package's own base class."""

    class Regression(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("error", self.training_step(batch, index), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            if optimizer == "qadam":
                return bf.QAdamOptimizer(self.parameters(), lr=0.01, warmup_steps=3)
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Regression()


def train(package: str, folder: str) -> None:
    """Fit, switch, write figures, validate, resume, test and predict; then by Bagua's names."""
    lightning = import_module(TRAINERS[package])
    logging.getLogger(TRAINERS[package]).setLevel(logging.ERROR)
    ours = import_module(f"asyncddp.integrations.{package}")
    bagua = import_module(f"asyncddp.integrations.bagua.{package}")
    loggers = import_module(f"{TRAINERS[package]}.loggers")
    callbacks = import_module(f"{TRAINERS[package]}.callbacks")

    def trainer(strategy: Any, epochs: int = 1, **options: Any) -> Any:
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        quiet["enable_checkpointing"] = "callbacks" in options
        return lightning.Trainer(
            strategy=strategy, accelerator="cpu", max_epochs=epochs, **{**quiet, **options}
        )

    def whole(epochs: int) -> Any:
        return trainer(
            ours.AsyncDDPStrategy("adapt_then_combine", checkpoint="per_rank", validate="average"),
            epochs,
            logger=loggers.CSVLogger(folder, version=0) if bf.rank() == 0 else False,
            callbacks=[
                callbacks.ModelCheckpoint(folder, monitor="error", save_last=True),
                ours.SwitchAlgorithm({1: "gradient_allreduce"}),
                ours.ConsensusMonitor(every=2),
                ours.TimelineCallback(),
            ],
        )

    first, model = whole(2), module(lightning.LightningModule, "sgd")
    first.fit(model, shares(), shares())
    assert isinstance(first.strategy, ours.AsyncDDPStrategy)
    assert first.strategy.distributed_optimizers[0].algorithm == "gradient_allreduce"
    second = whole(3)
    second.fit(model, shares(), shares(), ckpt_path=f"{folder}/last.ckpt")
    assert second.global_step == 3 * len(shares())
    second.test(model, shares(), verbose=False)
    assert len(second.predict(model, shares())) == len(shares())
    if bf.rank() == 0:
        assert "asyncddp/" in Path(folder, "lightning_logs/version_0/metrics.csv").read_text()
    for name in ("bytegrad", "async", "qadam"):
        trained = trainer(bagua.BaguaStrategy(algorithm=name))
        trained.fit(module(lightning.LightningModule, name), shares())
        assert trained.global_step == len(shares())
    keeps_bagua = lightning.__version__.startswith("2.2.")  # for a package that is not installed
    for name in ("asyncddp", "asyncddp_decentralized", "asyncddp" if keeps_bagua else "bagua"):
        trainer(name).fit(module(lightning.LightningModule, "sgd"), shares())


def train_by_fabric(package: str, folder: str) -> None:
    """Train, accumulate, gather, save and load."""
    fabric_package = import_module(FABRICS[package])
    ours = import_module(f"asyncddp.integrations.{package}")
    for strategy in (ours.AsyncDDPStrategy("bytegrad", checkpoint="per_rank"), "asyncddp_push_sum"):
        fabric = fabric_package.Fabric(accelerator="cpu", strategy=strategy)
        fabric.launch()
        assert (fabric.world_size, fabric.global_rank) == (bf.size(), bf.rank())
        model = network()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for number, (x, y) in enumerate(fabric.setup_dataloaders(shares())):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                fabric.backward(torch.nn.functional.mse_loss(model(x), y))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        ranks = fabric.all_gather(torch.tensor(fabric.global_rank))
        assert ranks.tolist() == list(range(bf.size()))
        assert fabric.all_reduce(torch.tensor(2.0), reduce_op="sum") == 2.0 * bf.size()
        assert fabric.broadcast(fabric.global_rank, 1) == 1
        fabric.barrier()
        state = {"model": model, "optimizer": optimizer, "epoch": 3}
        path = f"{folder}/{fabric.strategy._settings.method_name}.ckpt"
        fabric.save(path, state)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state["epoch"] = 0
        assert fabric.load(path, state) == {}
        assert state["epoch"] == 3
        if fabric.strategy._replicas == "all":
            torch.testing.assert_close(dict(model.state_dict()), kept)
        else:
            averages = {name: bf.allreduce(value) for name, value in kept.items()}
            torch.testing.assert_close(dict(model.state_dict()), averages)


@on("mpi-2")
@pytest.mark.parametrize("package", TRAINERS)
def test_the_trainer_of_either_package_trains(world: World, tmp_path: Path, package: str) -> None:
    """With callbacks, checkpoints and Bagua's names."""
    world.run(train, package, str(tmp_path))


@on("mpi-2")
@pytest.mark.parametrize("package", FABRICS)
def test_fabric_of_either_package_trains(world: World, tmp_path: Path, package: str) -> None:
    """Its checkpoints give back what was saved."""
    world.run(train_by_fabric, package, str(tmp_path))
