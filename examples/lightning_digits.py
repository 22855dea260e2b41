"""Lightning's Trainer on handwritten digits: trains, validates, checkpoints and resumes.

asyncddp run -np 4 examples/lightning_digits.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits

import asyncddp as bf
import topology
from asyncddp.integrations.lightning import AsyncDDPStrategy


class Digits(LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """How many are right, of all ranks' shares."""
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trainer(algorithm: str, epochs: int, folder: str) -> Trainer:
    """A Trainer that keeps its newest checkpoint in a folder."""
    strategy = AsyncDDPStrategy(
        algorithm,
        topology=topology.one_peer_exponential if algorithm == "adapt_then_combine" else None,
        checkpoint="per_rank",
        validate="average",
    )
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main() -> None:
    """Train, then go on from the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--algorithm", default="adapt_then_combine")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="two epochs")
    options = parser.parse_args()
    epochs = 2 if options.smoke else options.epochs
    bf.init()
    images, labels = load_digits(return_X_y=True)
    inputs, classes = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    train = torch.utils.data.TensorDataset(inputs[:1400], classes[:1400])
    test = torch.utils.data.TensorDataset(inputs[1400:], classes[1400:])
    loaders = (
        torch.utils.data.DataLoader(train, 32, shuffle=True),
        torch.utils.data.DataLoader(test, 64),
    )
    with tempfile.TemporaryDirectory() as own:
        folder = bf.broadcast_object(own, 0)
        trainer(options.algorithm, epochs // 2, folder).fit(Digits(), *loaders)
        second = trainer(options.algorithm, epochs, folder)
        second.fit(Digits(), *loaders, ckpt_path=f"{folder}/last.ckpt")
        if bf.rank() == 0:
            accuracy = second.callback_metrics["accuracy"].item()
            print(f"epoch {second.current_epoch}: accuracy {accuracy:.3f} of the average model")
        bf.barrier()


if __name__ == "__main__":
    main()
