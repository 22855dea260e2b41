"""Handwritten digits on ranks of which none sees all ten: neighbour averaging beside its rivals.

    asyncddp run -np 4 examples/digits.py

Every rank has images of a few digits only, and learns the others from its neighbours: one message
of model size per step. The same model is trained with a central average of all gradients, and on
one rank that has all images. A table and a picture compare them; where the average model ends more
than 1.5 points of accuracy behind the centralised one, the script says so and fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from support.data import Digits, read_digits
from support.report import Point, Run, progress_line, save_picture, show_table

import asyncddp as bf
import topology

BATCH = 64  # images per step, all ranks together
MARGIN = 1.5  # points of accuracy by which neighbour averaging may fall behind
CENTRALISED, ALONE = "gradient_allreduce", "one rank"  # the latter has all images


def main() -> None:
    """Train, compare, and fail in words where neighbour averaging falls behind."""
    options = parse_options()
    bf.init()
    if bf.size() > 10:
        fail(f"there are ten digits to share out, too few for {bf.size()} ranks")
    digits = bf.broadcast_object(read_digits() if bf.rank() == 0 else None, root_rank=0)
    methods = dict.fromkeys((options.algorithm, CENTRALISED, ALONE))  # each once, in this order
    runs = [train(method, digits, options) for method in methods]
    if bf.rank() == 0:
        show_table(runs, [digits.share(rank, bf.size()).classes for rank in range(bf.size())])
        save_picture(runs, options.out)
        print(f"The curves are in {options.out}.")
    behind = runs[-2].accuracy - runs[0].accuracy
    if behind > MARGIN and not options.smoke:
        fail(
            f"the average model of {options.algorithm} is {behind:.1f} points behind that of "
            f"{CENTRALISED}, more than {MARGIN}; train longer (--epochs) or with another --lr"
        )


def train(method: str, digits: Digits, options: argparse.Namespace) -> Run:
    """Train a model per rank with one method; all ranks call this together."""
    mine, batch = digits.share(bf.rank(), bf.size()), max(1, BATCH // bf.size())
    if method == ALONE:  # every rank does the same by itself
        mine, batch = digits, BATCH
    torch.manual_seed(options.seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    device = device_of_rank(options.device)
    model, mine = model.to(device), mine.to(device)
    bf.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.5)
    optimizer = distributed(method, optimizer, model)
    steps = 60 if options.smoke else options.epochs * (len(digits.labels) // BATCH)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    shuffle = torch.Generator().manual_seed(mine.classes[0] + 10 * options.seed)
    run = Run(method, [evaluate(0, model, mine)])
    with progress_line(method, steps, shown=bf.rank() == 0) as report:
        for step in range(1, steps + 1):
            images = torch.randint(len(mine.labels), (batch,), generator=shuffle)
            optimizer.zero_grad()
            F.cross_entropy(model(mine.inputs[images]), mine.labels[images]).backward()
            optimizer.step()
            scheduler.step()
            if step % max(1, steps // 60) == 0 or step == steps:
                run.points.append(evaluate(step, model, mine))
                report(run.points[-1])
    run.own_accuracies = bf.allgather_object(accuracy(model, mine))
    run.bytes_per_step = getattr(optimizer, "bytes_sent", 0) / steps
    return run


def device_of_rank(kind: str) -> torch.device:
    """With ``cuda`` one GPU for each rank of a machine, or shared ones where they are fewer."""
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        fail("torch sees no GPU here; leave --device out")
    return torch.device("cuda", bf.local_rank() % torch.cuda.device_count())


def distributed(
    method: str, optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> torch.optim.Optimizer:
    """Wrap the optimizer: the line that makes a training script decentralised."""
    schedule = topology.one_peer_exponential(bf.size())
    if method == "adapt_with_combine":
        return bf.DistributedNeighborAllreduceOptimizer(optimizer, model=model, topology=schedule)
    if method == "adapt_then_combine":
        return bf.DistributedAdaptThenCombineOptimizer(optimizer, model=model, topology=schedule)
    if method == CENTRALISED:
        return bf.DistributedGradientAllreduceOptimizer(optimizer, model=model)
    return optimizer


@torch.no_grad()
def evaluate(step: int, model: torch.nn.Module, mine: Digits) -> Point:
    """How good the average of all ranks' models is, and how far they are from it."""
    distance = bf.consensus_distance(model)
    model.eval()
    with bf.average_model(model):
        error = F.cross_entropy(model(mine.inputs), mine.labels, reduction="sum")
        totals = torch.tensor([float(error), len(mine.labels)])
        error, images = bf.allreduce(totals, average=False)
        point = Point(step, float(error / images), accuracy(model, mine), distance)
    model.train()
    return point


@torch.no_grad()
def accuracy(model: torch.nn.Module, digits: Digits) -> float:
    """Per cent of the test images, all ten digits, that the model names rightly."""
    right = model.eval()(digits.test_inputs).argmax(dim=1) == digits.test_labels
    return 100 * float(right.float().mean())


def fail(words: str) -> NoReturn:
    """End all ranks; rank 0 says why, and gives the run its exit code 1."""
    sys.exit(f"digits.py: {words}" if bf.rank() == 0 else 0)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def parse_options() -> argparse.Namespace:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(prog="digits.py", description=__doc__.partition("\n")[0])
    methods = ("adapt_with_combine", "adapt_then_combine", CENTRALISED)
    parser.add_argument("--algorithm", choices=methods, default=methods[0], help="(%(default)s)")
    parser.add_argument(
        "--epochs", type=positive, default=150, help="passes over all images (%(default)s)"
    )
    parser.add_argument("--lr", type=float, default=0.4, help="step size at first (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    devices = ("cpu", "cuda")
    parser.add_argument("--device", choices=devices, default="cpu", help="(%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="60 steps, to see that it runs")
    parser.add_argument(
        "--out", type=Path, default=Path("digits.png"), help="picture (%(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
