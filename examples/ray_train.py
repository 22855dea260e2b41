"""Ray Train's TorchTrainer, trained by neighbour averaging.

    python examples/ray_train.py --workers 4

Ray starts the workers, on this machine or on a cluster, and ``bf.init()`` joins them: there is no
launcher beside Ray. Each rank trains a small network on its share of noisy samples of a function,
and averages models with its neighbours by ``--algorithm``. After each epoch all ranks report the
loss of the average model to Ray, and rank 0 gives it to Ray as a checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS


def samples(seed: int, number: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy values of a function of four variables."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, 4, generator=generator)
    noise = 0.1 * torch.randn(number, 1, generator=generator)
    return inputs, inputs.square().sum(1, keepdim=True) + noise


def report_average(model: torch.nn.Module, epoch: int) -> None:
    """Tell Ray of the average model, which rank 0 gives to it; all ranks call it."""
    inputs, targets = samples(seed=-1)
    with bf.average_model(model), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        loss = torch.nn.functional.mse_loss(model(inputs), targets).item()
        checkpoint = None
        if bf.rank() == 0:
            torch.save(model.state_dict(), Path(folder, "model.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"epoch": epoch, "loss": loss, "ranks": bf.size()}, checkpoint=checkpoint)


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """What each of Ray's workers does: a training loop as ever, after ``bf.init()``."""
    bf.init()  # joins the process group that Ray has made
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = bf.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=config["lr"]),
        model,
        algorithm=config["algorithm"],
        topology="one_peer_exponential",
    )
    share = torch.utils.data.TensorDataset(*samples(seed=bf.rank()))
    loader = torch.utils.data.DataLoader(share, batch_size=16, shuffle=True)
    for epoch in range(config["epochs"]):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        report_average(model, epoch)
    bf.shutdown()


def main() -> None:
    """Train by Ray, and read what it has kept."""
    options = parse_options()
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"lr": 0.01, "epochs": options.epochs, "algorithm": options.algorithm},
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(storage_path=str(options.out.absolute())),
    )
    result = trainer.fit()
    with result.checkpoint.as_directory() as folder:
        names = sorted(torch.load(Path(folder, "model.pt"), weights_only=True))
    loss, ranks = result.metrics["loss"], result.metrics["ranks"]
    print(f"{ranks} ranks trained by {options.algorithm}; the average model has loss {loss:.3f}")
    print(f"its checkpoint has {', '.join(names)}")


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
    add("--workers", type=int, default=2, help="of Ray, a rank each (default: %(default)s)")
    add("--epochs", type=int, default=20, help="of each rank's share (default: %(default)s)")
    add("--out", type=Path, default=Path("ray_train"), help="folder (default: %(default)s)")
    add("--smoke", action="store_true", help="two epochs, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.epochs = 2
    return options


if __name__ == "__main__":
    main()
