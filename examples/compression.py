"""Accuracy for bytes: the same training with each compressor, by how much every rank sends.

    asyncddp run -np 4 examples/compression.py

Every rank trains on its share of scikit-learn's handwritten digits. What differs is what travels:

    gradient_allreduce             all ranks average their gradients, in 32 bits an element
    … fp16, … power_sgd, … top_k   the same, compressed; what is lost is added to the next gradient
    bytegrad                       gradients in 8 bits
    decentralized                  two ranks in turn average their models
    low_precision_decentralized    ring neighbours send differences in 8 bits
    choco_sgd … sign               neighbours send the sign of each difference: 1 bit

A table, a picture and a sentence say what a rank has sent until the average of all ranks' models
reached ``--target``, and how long that takes over a link of ``--mbit-per-second``. Model, start,
batches and optimizer are the same for all.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import asyncddp as bf

RUNS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "gradient_allreduce fp16": {"compression": "fp16"},
    "gradient_allreduce power_sgd": {"compression": "power_sgd"},
    "gradient_allreduce top_k": {"compression": "top_k"},
    "bytegrad": {},
    "decentralized": {"peer_selection_mode": "shift_one"},
    "low_precision_decentralized": {},
    "choco_sgd sign": {"compression": "sign"},
}
"""By name, whose first word is the method: arguments of ``DistributedOptimizer``."""

Images = list[torch.Tensor]  # to train on and to test with, and the labels of both
BATCH = 64  # images per step and rank
EVERY = 5  # steps between two looks at the average model
COLORS = ("black", "#0072B2", "#56B4E9", "#009E73", "#E69F00", "0.6", "#D55E00", "#CC79A7")


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        name: Of ``RUNS``.
        nbytes: What a rank had sent, after each look.
        accuracy: Of the average of all ranks' models, in per cent.
        steps: That were made in all.
    """

    name: str
    nbytes: list[int]
    accuracy: list[float]
    steps: int

    def reached(self, target: float) -> int | None:
        """Bytes that a rank had sent when the average model first had this accuracy, or None."""
        points = zip(self.nbytes, self.accuracy, strict=True)
        return next((nbytes for nbytes, height in points if height >= target), None)


def main() -> None:
    """Train with each compressor, then say and draw what came of it."""
    options = parse_options()
    bf.init()
    if bf.size() == 1:
        sys.exit("compression.py: one rank sends nothing; asyncddp run -np 4 starts four")
    images = bf.broadcast_object(read_images() if bf.rank() == 0 else None, root_rank=0)
    runs = [train(name, images, options) for name in options.runs]
    if bf.rank() == 0:
        show_table(runs, options)
        save_picture(runs, options)
        print(f"{summary(runs, options.target)}\nThe picture is {options.out}.")


def read_images() -> Images:
    """Set a quarter of each digit's images aside for the test; each has 64 numbers in 0..1."""
    from sklearn.datasets import load_digits  # loaded by the rank that reads only
    from sklearn.model_selection import train_test_split

    inputs, labels = load_digits(return_X_y=True)
    inputs = (inputs / 16).astype("float32")
    parts = train_test_split(inputs, labels, test_size=450, stratify=labels, random_state=0)
    return [torch.from_numpy(part) for part in parts]


def train(name: str, images: Images, options: argparse.Namespace) -> Run:
    """Train with one compressor; all ranks call this together."""
    torch.manual_seed(options.seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    inner = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = bf.DistributedOptimizer(inner, model, name.split()[0], **RUNS[name])
    inputs, labels = (images[part][bf.rank() :: bf.size()] for part in (0, 2))  # this rank's share
    shuffle = torch.Generator().manual_seed(1000 * options.seed + bf.rank())
    run = Run(name, [], [], options.steps)
    for step in range(options.steps):
        batch = torch.randint(len(labels), (BATCH,), generator=shuffle)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            run.nbytes.append(max(bf.allgather_object(optimizer.bytes_sent)))
            run.accuracy.append(accuracy_of_average(model, images))
    if bf.rank() == 0:
        print(f"{name:30} accuracy {run.accuracy[-1]:5.1f} %", flush=True)
    return run


@torch.no_grad()
def accuracy_of_average(model: torch.nn.Module, images: Images) -> float:
    """Judge the average of all ranks' models, and leave this rank's as it is."""
    own = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(bf.allreduce(own), model.parameters())
    found = 100 * float((model(images[1]).argmax(dim=1) == images[3]).float().mean())
    torch.nn.utils.vector_to_parameters(own, model.parameters())
    return found


def show_table(runs: list[Run], options: argparse.Namespace) -> None:
    """One line for each training."""
    table = Table(title=f"What a rank sends, on {bf.size()} ranks", title_justify="left")
    target = f"{options.target:g} %"
    link = f"over {options.mbit_per_second:g} Mbit/s"
    for column in ("", "KB a step", "accuracy", f"KB to {target}", f"seconds {link}"):
        table.add_column(column, justify="right" if column else "left")
    for run in runs:
        sent = run.reached(options.target)
        cells = ["never", "never"]
        if sent is not None:
            cells = [f"{sent / 1e3:,.0f}", f"{sent * 8 / options.mbit_per_second / 1e6:.2f}"]
        step = run.nbytes[-1] / run.steps / 1e3
        table.add_row(run.name, f"{step:.1f}", f"{run.accuracy[-1]:.1f} %", *cells)
    Console(width=100).print(table)


def summary(runs: list[Run], target: float) -> str:
    """What these trainings have shown, in one sentence; others are compared with the first."""
    sent = {run.name: nbytes for run in runs if (nbytes := run.reached(target)) is not None}
    if not sent:
        return f"On {bf.size()} ranks no average model reached {target:g} % accuracy."
    least, first = min(sent, key=sent.__getitem__), runs[0].name
    said = (
        f"On {bf.size()} ranks the average model reaches {target:g} % accuracy with the fewest "
        f"bytes by {least}: {sent[least] / 1e3:,.0f} KB from each rank"
    )
    if first in sent and first != least:
        said += f", {sent[first] / sent[least]:.0f} times less than by {first}"
    return f"{said}."


def save_picture(runs: list[Run], options: argparse.Namespace) -> None:
    """Accuracy over what a rank has sent; the sentence is the file's description."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 11}):
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        axes = figure.subplots()
        axes.axhline(options.target, color="0.6", linewidth=1, linestyle=(0, (5, 4)))
        for run, color in zip(runs, COLORS, strict=False):
            sent = [nbytes / 1e6 for nbytes in run.nbytes]
            axes.plot(sent, run.accuracy, color=color, linewidth=1.8, label=run.name)
        axes.set(xscale="log", xlabel="MB that a rank has sent", ylim=(0, 100))
        axes.set_title("accuracy of the average model on test images, %", loc="left")
        figure.legend(loc="outside right center", frameon=False, fontsize=9)
        field = "Subject" if options.out.suffix == ".pdf" else "Description"
        figure.savefig(options.out, dpi=150, metadata={field: summary(runs, options.target)})


def positive(text: str) -> float:
    """A number above 0."""
    if not float(text) > 0:
        raise ValueError
    return float(text)


def parse_options() -> argparse.Namespace:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(
        prog="compression.py",
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--runs", nargs="+", choices=list(RUNS), default=list(RUNS), help="which", metavar="RUN")
    add("--steps", type=int, default=300, help="of each training")
    add("--target", type=positive, default=95, help="per cent of the test images to reach")
    add("--mbit-per-second", type=positive, default=100, help="of the link in the table")
    add("--lr", type=positive, default=0.05, help="step size")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--out", type=Path, default=Path("compression.png"), help="picture: png, svg or pdf")
    add("--smoke", action="store_true", help="a few steps, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.steps = 2 * EVERY
    if options.steps < EVERY:
        parser.error(f"argument --steps: expected at least {EVERY}, got {options.steps}")
    return options


if __name__ == "__main__":
    main()
