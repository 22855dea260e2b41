"""Time to accuracy with one slow rank: a central average, neighbours that wait, ranks that do not.

    asyncddp run -np 4 examples/digits.py

Every rank trains on its share of scikit-learn's handwritten digits, and the last rank takes ten
times as long for a step. The same model is trained for the same time by three methods:

    ddp                 torch's DistributedDataParallel on gloo averages the gradients of all ranks
    adapt_then_combine  averages the models of two neighbours in each step; they wait for each other
    win_put             averages with what two neighbours have published last, and waits for nobody

A table, a picture and a sentence say when the average of all ranks' models reached ``--target``.
Images, model, start, batches and optimizer are the same for all methods; each has the step size by
which it was there first (RATES: of 0.1, 0.2 … 0.6 and 0.8, by the median of the seeds 0 to 2).
A step takes at least ``--step-time`` seconds: ranks compute little and sleep for the rest, as a
processor waits for its accelerator, so that few cores can stand for many.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from support.data import SPLITS, Digits, read_digits
from support.gloo import start_gloo
from support.report import save_picture, show_table, summary
from support.trial import Mark, Trial, accuracy, curve_of

import asyncddp as bf
from asyncddp import topology

RATES = {"ddp": 0.4, "adapt_then_combine": 0.4, "win_put": 0.6}
WAITING = ("ddp", "gradient_allreduce", "adapt_then_combine", "adapt_with_combine")
ONE_SIDED = ("win_put", "pull_get", "async_model_average", "push_sum")
BATCH = 64  # images per step and rank
EVERY = 0.1  # seconds between the models that are kept and judged afterwards


def main() -> None:
    """Train with each method, then say and draw what came of it."""
    options = parse_options()
    bf.init()
    if bf.size() == 1:
        sys.exit("digits.py: one rank has nobody to wait for; asyncddp run -np 4 starts four")
    digits = bf.broadcast_object(read_digits() if bf.rank() == 0 else None, root_rank=0)
    trials = [train(method, digits, options) for method in options.methods]
    if bf.rank() == 0:
        show_table(trials, options.target)
        says = summary(trials, options.target, options.slower)
        save_picture(trials, options.target, says, options.out)
        print(f"{says}\nThe picture is {options.out}.")


def train(method: str, digits: Digits, options: argparse.Namespace) -> Trial:
    """Train with one method; all ranks call this together."""
    torch.manual_seed(options.seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model, digits = model.to(device_of(options)), digits.to(device_of(options))
    rate = options.lr or RATES.get(method, 0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    network, optimizer = distributed(method, optimizer, model)
    mine = digits.share(bf.rank(), bf.size(), options.split)
    shuffle = torch.Generator().manual_seed(1000 * options.seed + bf.rank())
    pause = options.step_time * (options.slower if bf.rank() == bf.size() - 1 else 1)
    marks: list[Mark] = []
    bf.barrier()
    start = time.monotonic()
    for step in count():
        begun = time.monotonic()
        over = is_over(method, step, begun - start, options)
        if over or begun - start >= EVERY * len(marks):
            marks.append(Mark.of(model, step, begun - start))
            show_progress(method, marks, model, digits)
        if over:
            break
        images = torch.randint(len(mine.labels), (BATCH,), generator=shuffle)
        optimizer.zero_grad()
        F.cross_entropy(network(mine.inputs[images]), mine.labels[images]).backward()
        optimizer.step()
        time.sleep(max(0.0, begun + pause - time.monotonic()))
    bf.barrier()
    if method == "ddp":
        torch.distributed.destroy_process_group()
    return Trial(method, bf.allgather_object(marks[-1]), curve_of(marks, EVERY, model, digits))


def distributed(
    method: str, optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """What is called and what steps: the lines that make a training script distributed."""
    if method == "ddp":
        start_gloo()
        return torch.nn.parallel.DistributedDataParallel(model), optimizer
    graph = topology.exponential_two(bf.size())  # two neighbours of four ranks
    if method not in ONE_SIDED:
        graph = topology.one_peer_exponential(bf.size())  # one of them in turn
    return model, bf.DistributedOptimizer(optimizer, model, algorithm=method, topology=graph)


def is_over(method: str, step: int, seconds: float, options: argparse.Namespace) -> bool:
    """Whether to stop; who waits for the slow rank makes as many steps as that has time for."""
    if method in ONE_SIDED:
        return seconds >= options.seconds
    return step >= round(options.seconds / (options.step_time * options.slower))


def show_progress(method: str, marks: list[Mark], model: torch.nn.Module, digits: Digits) -> None:
    """A line on rank 0 about every three seconds."""
    before, now = (mark.seconds // 3 for mark in (marks[-2:] if marks[1:] else marks * 2))
    if bf.rank() == 0 and (now > before or not marks[1:]):
        print(
            f"{method:20}{marks[-1].seconds:5.1f} s {marks[-1].step:6} steps  "
            f"accuracy of rank 0 {accuracy(model, digits):5.1f} %",
            flush=True,
        )


def device_of(options: argparse.Namespace) -> torch.device:
    """With ``cuda`` one GPU for each rank of a machine, or shared ones where they are fewer."""
    if options.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sys.exit("digits.py: torch sees no GPU here; leave --device out")
    return torch.device("cuda", bf.local_rank() % torch.cuda.device_count())


def positive(text: str) -> float:
    """A number above 0."""
    if not float(text) > 0:
        raise ValueError
    return float(text)


def parse_options() -> argparse.Namespace:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(
        prog="digits.py",
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--methods", nargs="+", choices=(*WAITING, *ONE_SIDED), default=list(RATES), help="which")
    add("--slower", type=positive, default=10, help="how much longer the last rank's step takes")
    add("--seconds", type=positive, default=12, help="of each training")
    add("--step-time", type=positive, default=0.02, help="least seconds of a step")
    add("--target", type=positive, default=95, help="per cent of the test images to reach")
    add(
        "--split",
        choices=SPLITS,
        default=SPLITS[0],
        help="what a rank's share is: some images of all digits, or all images of some digits",
    )
    add("--lr", type=positive, help="step size of all methods, instead of each one's own")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the model is")
    add("--out", type=Path, default=Path("digits.png"), help="picture: png, svg or pdf")
    add("--smoke", action="store_true", help="a second of short steps, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.seconds, options.step_time = 1.0, 0.002
    return options


if __name__ == "__main__":
    main()
