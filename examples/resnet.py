"""A ResNet on images: batch normalisation, augmentation and schedule, with any method.

    asyncddp run -np 4 examples/resnet.py
    torchrun --nproc-per-node 4 examples/resnet.py --method win_put
    asyncddp run -np 4 examples/resnet.py --data cifar-10-batches-py --depth 20 --epochs 160
    python examples/resnet.py

Every rank trains on its share of the images and averages its model with neighbours by ``--method``,
any of the library's. ``--data DIR`` has the python version of CIFAR-10, as its archive unpacks;
without it the images are scikit-learn's 1,797 handwritten digits, made twice as large.

What a layer of batch normalisation learns from depends on ``--norm``:

    local    the batch of its rank; running statistics stay the rank's own while it trains, and are
             merged for the average model: m = mean(m_j), v = mean(v_j + (m_j - m)^2)
    sync     the batches of all ranks together, which then wait for each other in each layer, by
             whatever method they average; for small batches, and ranks with different data

torch.nn.SyncBatchNorm needs GPUs and torch.distributed; the layer here runs wherever the library
does. In the end a line tells the average model's accuracy, and how far the ranks are from it.
"""

from __future__ import annotations

import argparse
import pickle
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import asyncddp as bf
import asyncddp.integrations.bagua.torch_api as bagua
from asyncddp.algorithms import ALGORITHMS
from asyncddp.integrations.bagua.torch_api.contrib import SyncBatchNorm

Images = tuple[TensorDataset, TensorDataset]  # to train on and to test with: uint8 (n, 3, s, s)


class ArrayUnpickler(pickle.Unpickler):
    """Reads arrays, lists, numbers and text; a file that names anything else is refused."""

    NAMES = ("numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct")

    def find_class(self, module: str, name: str) -> Any:
        """The constructor of arrays, by its old name or its new one."""
        if f"{module}.{name}".replace("_core", "core") not in self.NAMES:
            raise pickle.UnpicklingError(f"expected arrays and text alone, got {module}.{name}")
        return super().find_class(module, name)


def read_cifar(folder: Path, names: list[str]) -> TensorDataset:
    """Files of CIFAR-10, which Python 2 has pickled: 3072 bytes for each image, red first."""
    images, labels = [], []
    for name in names:
        with (folder / name).open("rb") as file:
            batch = ArrayUnpickler(file, encoding="bytes").load()
        images.append(torch.from_numpy(batch[b"data"]).view(-1, 3, 32, 32))
        labels.append(torch.tensor(batch[b"labels"]))
    return TensorDataset(torch.cat(images), torch.cat(labels))


def read_images(folder: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Images to train on and to test with, bytes of shape (n, 3, side, side), and labels."""
    if folder is not None:
        parts = [f"data_batch_{number}" for number in range(1, 6)]
        return read_cifar(folder, parts), read_cifar(folder, ["test_batch"])
    from sklearn.datasets import load_digits

    pixels, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = (pixels * 15).to(torch.uint8).view(-1, 1, 8, 8).expand(-1, 3, -1, -1)
    images = images.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:-400], order[-400:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Block(torch.nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = torch.nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = torch.nn.BatchNorm2d(outputs), torch.nn.BatchNorm2d(outputs)
        self.shortcut = torch.nn.Sequential()
        if stride != 1 or inputs != outputs:
            conv = torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = torch.nn.Sequential(conv, torch.nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the convolutions add to the input."""
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


def resnet(depth: int, width: int, classes: int = 10) -> torch.nn.Sequential:
    """A ResNet of 6 k + 2 layers for small images, as in He et al. 2016, section 4.2."""
    layers = [torch.nn.Conv2d(3, width, 3, padding=1, bias=False), torch.nn.BatchNorm2d(width)]
    layers.append(torch.nn.ReLU())
    inputs = width
    for stage in range(3):
        for place in range((depth - 2) // 6):
            layers.append(Block(inputs, width << stage, 2 if stage and not place else 1))
            inputs = width << stage
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(inputs, classes)]
    return torch.nn.Sequential(*layers)


def augment(images: torch.Tensor, mirror: bool) -> torch.Tensor:
    """Crop each image at random from a padded one; mirror half of them."""
    count, _, side, _ = images.shape
    margin = side // 8
    top, left = torch.randint(2 * margin + 1, (2, count, 1, 1))
    rows, columns = torch.arange(side).view(1, -1, 1) + top, torch.arange(side).view(1, 1, -1)
    if mirror:
        columns = torch.where(torch.rand(count, 1, 1) < 0.5, columns, side - 1 - columns)
    padded, image = F.pad(images, [margin] * 4), torch.arange(count).view(-1, 1, 1)
    return padded[image, :, rows, columns + left].permute(0, 3, 1, 2)


def as_floats(images: torch.Tensor) -> torch.Tensor:
    """Bytes as numbers about zero."""
    return images / 64 - 2


@torch.no_grad()
def accuracy(model: torch.nn.Module, test: TensorDataset) -> float:
    """Of the average model, in per cent; each rank judges a share of the images."""
    images, labels = (part[bf.rank() :: bf.size()] for part in test.tensors)
    with bf.average_model(model):
        model.eval()
        right = sum(
            int((model(as_floats(some)).argmax(1) == true).sum())
            for some, true in zip(images.split(500), labels.split(500), strict=True)
        )
        model.train()
    return 100 * float(bf.allreduce(torch.tensor(float(right)), average=False)) / len(test)


def new_model(options: argparse.Namespace) -> torch.nn.Module:
    """The network, with one kind of batch normalisation or the other."""
    model = resnet(options.depth, options.width)
    if options.norm == "local":
        return model
    bagua.init_process_group()  # of the ranks that are there
    return SyncBatchNorm.convert_sync_batchnorm(model)


def new_optimizer(model: torch.nn.Module, options: argparse.Namespace) -> bf.DistributedOptimizer:
    """SGD with momentum, wrapped: the lines that make the script distributed."""
    momentum = 0.0 if ALGORITHMS[options.method].owns_momentum else 0.9  # no method counts it twice
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), options.lr, momentum, weight_decay=5e-4
    )
    if options.method == "qadam":
        optimizer = bf.QAdamOptimizer(model.parameters(), options.lr / 50)
    return bf.DistributedOptimizer(
        optimizer, model, algorithm=options.method, topology=options.topology
    )


def main() -> None:
    """Train, and judge the average of all ranks' models after each epoch."""
    options = parse_options()
    bf.init()
    train, test = read_images(options.data)
    torch.manual_seed(options.seed + bf.rank())  # ranks augment differently; the start is rank 0's
    model = new_model(options)
    optimizer = new_optimizer(model, options)
    batch = min(options.batch, len(train) // bf.size())
    loader = DataLoader(train, batch, shuffle=True, drop_last=True)
    loader = bf.prepare_data_loader(loader, seed=options.seed)  # this rank's share
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=optimizer.param_groups[0]["lr"],
        total_steps=options.epochs * len(loader),
        pct_start=options.warm_up,
        cycle_momentum=False,
    )
    losses, rights = list[list[float]](), list[float]()
    for epoch in range(options.epochs):
        begun, total = time.monotonic(), 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            logits = model(as_floats(augment(images, mirror=options.data is not None)))
            loss = F.cross_entropy(logits, labels, label_smoothing=options.label_smoothing)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        speed = len(loader) * batch / (time.monotonic() - begun)
        losses.append(bf.allgather_object(total / len(loader)))
        rights.append(right := accuracy(model, test))
        if bf.rank() == 0:
            print(
                f"epoch {epoch + 1:3}: {speed:6.0f} images/s and loss {total / len(loader):.3f} on "
                f"rank 0, {right:5.1f} % right by the average model",
                flush=True,
            )
    distance = bf.consensus_distance(model)
    if bf.rank() == 0:
        print(
            f"{bf.size()} ranks by {options.method}, --norm {options.norm}: the average model has "
            f"{right:.1f} % right, the ranks are {distance:.1e} from it"
        )
        if options.out:
            save_picture(losses, rights, options)


def save_picture(
    losses: list[list[float]], rights: list[float], options: argparse.Namespace
) -> None:
    """Each rank's loss in training, and the average model's accuracy, over epochs."""
    from matplotlib.figure import Figure

    figure, epochs = Figure(figsize=(8, 3.4), layout="constrained"), range(1, len(rights) + 1)
    left, right = figure.subplots(1, 2)
    for rank, of_rank in enumerate(zip(*losses, strict=True)):
        left.plot(epochs, of_rank, ".-", linewidth=0.9, label=f"rank {rank}")
    right.plot(epochs, rights, "ko-", markersize=4)
    left.legend(frameon=False, fontsize=9)
    left.set(xlabel="epoch", ylabel="loss in training", yscale="log")
    right.set(xlabel="epoch", ylabel="% right by the average model")
    figure.suptitle(f"{bf.size()} ranks by {options.method}, --norm {options.norm}", fontsize=9)
    figure.savefig(options.out, dpi=100)


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The text above as it is, and all defaults."""


def parse_options() -> argparse.Namespace:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add, methods = parser.add_argument, sorted(ALGORITHMS)
    says = f"one of {', '.join(methods)}"
    add("--method", choices=methods, default="adapt_then_combine", metavar="NAME", help=says)
    add("--topology", metavar="NAME", help="graph of ranks, such as ring; None: the method's own")
    add("--data", type=Path, metavar="DIR", help="CIFAR-10, python version; None: digits")
    add("--norm", choices=("local", "sync"), default="local", help="see above")
    add("--depth", type=int, default=8, help="layers: 6 k + 2")
    add("--width", type=int, default=16, help="channels of the first stage")
    add("--epochs", type=int, default=12, help="of training")
    add(
        "--warm-up", type=float, default=0.1, help="share of the steps in which the step size grows"
    )
    add("--batch", type=int, default=32, help="images in a step, on each rank")
    add("--lr", type=float, default=0.1, help="largest step size")
    add("--label-smoothing", type=float, default=0.0, help="share of a label given to all others")
    add("--seed", type=int, default=0, help="of weights, order and crops")
    add("--out", type=Path, help="picture: png, svg or pdf")
    add("--smoke", action="store_true", help="one epoch of a narrow network, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.epochs, options.width = 1, 4
    if options.depth < 8 or options.depth % 6 != 2:
        parser.error(f"argument --depth: expected 8, 14, 20, …, got {options.depth}")
    if options.data and not (options.data / "test_batch").is_file():
        parser.error(f"argument --data: expected a folder with test_batch, got {options.data}")
    for name in ("width", "epochs", "batch"):
        if (got := getattr(options, name)) < 1:
            parser.error(f"argument --{name}: expected at least 1, got {got}")
    return options


if __name__ == "__main__":
    main()
