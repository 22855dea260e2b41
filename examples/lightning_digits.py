"""A LightningModule on handwritten digits, trained by neighbour averaging: fit, log and resume.

    asyncddp run -np 4 examples/lightning_digits.py

Everything here is Lightning's own but for the strategy and one callback. Each rank trains on its
share of scikit-learn's digits and averages parameters with its neighbours by ``--algorithm``, any
of the library's methods. Validation sees the average of all ranks' models. Half of the epochs are
made by one Trainer, the others by a second one, which resumes from the checkpoint of the first;
then the ranks' distances from the average model are read from the logger. The folder ``--out``
keeps checkpoints and ``metrics.csv``.

To use it with your own script, give your Trainer ``strategy=AsyncDDPStrategy()``, or
``strategy="asyncddp"`` after importing ``asyncddp.integrations.lightning``.
"""

from __future__ import annotations

import argparse
import csv
import logging
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from asyncddp.algorithms import ALGORITHMS
from asyncddp.integrations.lightning import AsyncDDPStrategy, ConsensusMonitor

warnings.filterwarnings("ignore", module="lightning")  # hints about srun, loggers and workers
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


class Digits(LightningModule):
    """A small network; nothing in it knows of ranks."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch of this rank's share."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """How many are right, averaged over the ranks' shares."""
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """A line on rank 0."""
        accuracy = 100 * self.trainer.callback_metrics["accuracy"]
        self.print(f"epoch {self.current_epoch + 1:3}: {accuracy:5.1f} % right")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum, which the strategy wraps."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class DigitsData(LightningDataModule):
    """All images; the Trainer gives each rank a share of them by its own sampler."""

    def setup(self, stage: str) -> None:
        """Read them."""
        inputs, labels = map(torch.from_numpy, load_digits(return_X_y=True))
        images = TensorDataset(inputs.float() / 16, labels)
        parts = (len(images) - 400, 400)
        seeded = torch.Generator().manual_seed(0)  # the same parts on all ranks
        self.train, self.test = torch.utils.data.random_split(images, parts, seeded)

    def train_dataloader(self) -> DataLoader[list[torch.Tensor]]:
        """Batches to train on."""
        return DataLoader(self.train, batch_size=16, shuffle=True)

    def val_dataloader(self) -> DataLoader[list[torch.Tensor]]:
        """Batches to validate on."""
        return DataLoader(self.test, batch_size=100)


def new_trainer(epochs: int, options: argparse.Namespace) -> Trainer:
    """A Trainer for so many epochs; the strategy is the line that a script for DDP changes."""
    return Trainer(
        strategy=AsyncDDPStrategy(options.algorithm, replicas="all", validate="average"),
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[
            ModelCheckpoint(options.out / "checkpoints", save_last=True),
            ConsensusMonitor(every=10),
        ],
        logger=CSVLogger(options.out, name="logs"),
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def last_distances(file: Path) -> dict[str, float]:
    """By rank the last distance from the average model that ConsensusMonitor has logged."""
    found = {}
    with file.open(newline="") as rows:
        for row in csv.DictReader(rows):
            for name, value in row.items():
                if name.startswith("asyncddp/consensus_distance/") and value:
                    found[name.rpartition("/")[2]] = float(value)
    return found


def main() -> None:
    """Train, resume, and say what came of it."""
    options = parse_options()
    data, half = DigitsData(), options.epochs // 2
    first = new_trainer(half, options)
    if first.is_global_zero:
        print(f"{first.world_size} ranks train by {options.algorithm}")
    first.fit(Digits(options.lr), data)

    checkpoint = first.checkpoint_callback.last_model_path
    if first.is_global_zero:
        print(f"a second Trainer resumes from {checkpoint}, each rank from its own file beside it")
    second = new_trainer(options.epochs, options)
    second.fit(Digits(options.lr), data, ckpt_path=checkpoint)

    if second.is_global_zero:
        file = Path(second.logger.log_dir, "metrics.csv")
        for rank, distance in sorted(last_distances(file).items()):
            print(f"{rank} is {distance:.3f} from the average model")
        accuracy = 100 * second.callback_metrics["accuracy"]
        print(f"the average model has {accuracy:.1f} % right; all figures are in {file}")


def parse_options() -> argparse.Namespace:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--algorithm",
        choices=sorted(ALGORITHMS),
        default="adapt_then_combine",
        metavar="NAME",
        help=f"one of {', '.join(sorted(ALGORITHMS))} (default: %(default)s)",
    )
    add("--epochs", type=int, default=10, help="of both Trainers together (default: %(default)s)")
    add("--lr", type=float, default=0.1, help="step size (default: %(default)s)")
    add("--out", type=Path, default=Path("lightning_digits"), help="folder (default: %(default)s)")
    add("--smoke", action="store_true", help="two epochs, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.epochs = 2
    return options


if __name__ == "__main__":
    main()
