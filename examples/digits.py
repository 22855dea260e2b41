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
import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import asyncddp as bf
from asyncddp import topology

RATES = {"ddp": 0.4, "adapt_then_combine": 0.4, "win_put": 0.6}
WAITING = ("ddp", "gradient_allreduce", "adapt_then_combine", "adapt_with_combine")
ONE_SIDED = ("win_put", "pull_get", "async_model_average", "push_sum")
BATCH = 64  # images per step and rank
EVERY = 0.1  # seconds between the models that are kept and judged afterwards
NEVER = float("inf")
Images = list[torch.Tensor]  # to train on and to test with, and the labels of both
STYLES = (("#D55E00", "-"), ("#56B4E9", "--"), ("#0072B2", "-"), ("#009E73", ":"))


class Trial(NamedTuple):
    """One training."""

    name: str
    rates: tuple[float, float]  # steps per second: the other ranks' mean, and the slow one's
    curve: list[tuple[float, float]]  # seconds, and the average model's accuracy in per cent

    def reached(self, target: float) -> float:
        """Seconds until the average model first had this accuracy."""
        return next((seconds for seconds, height in self.curve if height >= target), NEVER)


def main() -> None:
    """Train with each method, then say and draw what came of it."""
    options = parse_options()
    bf.init()
    if bf.size() == 1:
        sys.exit("digits.py: one rank has nobody to wait for; asyncddp run -np 4 starts four")
    images = bf.broadcast_object(read_images() if bf.rank() == 0 else None, root_rank=0)
    device = torch.device(options.device)
    if options.device == "cuda":  # a GPU for each rank of a machine, or shared ones
        device = torch.device("cuda", bf.local_rank() % torch.cuda.device_count())
    images = [part.to(device) for part in images]
    trials = [train(method, images, options) for method in options.methods]
    if bf.rank() == 0:
        show_table(trials, options.target)
        says = summary(trials, options)
        save_picture(trials, says, options)
        print(f"{says}\nThe picture is {options.out}.")


def read_images() -> Images:
    """Set a quarter of each digit's images aside for the test; each has 64 numbers in 0..1."""
    from sklearn.datasets import load_digits  # loaded by the rank that reads only
    from sklearn.model_selection import train_test_split

    inputs, labels = load_digits(return_X_y=True)
    parts = train_test_split(inputs, labels, test_size=450, stratify=labels, random_state=0)
    train, test, *labels = (torch.from_numpy(part) for part in parts)
    return [train.float() / 16, test.float() / 16, *labels]


def train(method: str, images: Images, options: argparse.Namespace) -> Trial:
    """Train with one method; all ranks call this together."""
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(images[0].device)
    rate = options.lr or RATES.get(method, 0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    network, optimizer = distributed(method, optimizer, model)
    inputs, _, labels, _ = images
    share = (labels.cpu() if options.split == "digits" else torch.arange(len(labels))) % bf.size()
    mine = (share == bf.rank()).nonzero()[:, 0]
    shuffle = torch.Generator().manual_seed(1000 * options.seed + bf.rank())
    pause = options.step_time * (options.slower if bf.rank() == bf.size() - 1 else 1)
    steps = options.seconds / options.step_time / options.slower  # which all make who wait
    kept, own, told = [], parameters_to_vector(model.parameters()).detach().cpu(), 0
    bf.barrier()
    start = time.monotonic()
    for step in count():
        seconds = time.monotonic() - start
        kept += [own] * (int(seconds / EVERY) + 1 - len(kept))  # the model at moments that passed
        own = parameters_to_vector(model.parameters()).detach().cpu()
        over = seconds >= options.seconds if method in ONE_SIDED else step >= round(steps)
        if bf.rank() == 0 and seconds >= 3 * told:
            told, right = told + 1, f"accuracy of rank 0 {accuracy(model, images):5.1f} %"
            print(f"{method:20}{seconds:5.1f} s {step:6} steps  {right}", flush=True)
        if over:
            break
        batch = mine[torch.randint(len(mine), (BATCH,), generator=shuffle)]
        optimizer.zero_grad()
        F.cross_entropy(network(inputs[batch]), labels[batch]).backward()
        optimizer.step()
        time.sleep(max(0.0, start + seconds + pause - time.monotonic()))
    bf.barrier()
    if method == "ddp":
        torch.distributed.destroy_process_group()
    ends = bf.allgather_object((step, seconds))
    *fast, slow = (made / max(seconds, 1e-9) for made, seconds in ends)
    end = max(seconds for _, seconds in ends)
    kept += [own] * (int(end / EVERY) + 2 - len(kept))
    curve = []
    for number, average in enumerate(bf.allreduce(torch.stack(kept)).to(inputs.device)):
        vector_to_parameters(average, model.parameters())
        curve.append((min(EVERY * number, end), accuracy(model, images)))
    name = "DDP (gloo)" if method == "ddp" else method
    return Trial(name, (sum(fast) / len(fast), slow), curve)


def distributed(method: str, optimizer: Any, model: nn.Module) -> tuple[nn.Module, Any]:
    """What is called and what steps: the lines that make a training script distributed."""
    if method == "ddp":
        if bf.local_size() == bf.size():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group("gloo")  # finds the others by what launchers announce
        return nn.parallel.DistributedDataParallel(model), optimizer
    graph = topology.exponential_two(bf.size())  # two neighbours of four ranks
    if method not in ONE_SIDED:
        graph = topology.one_peer_exponential(bf.size())  # one of them in turn
    return model, bf.DistributedOptimizer(optimizer, model, algorithm=method, topology=graph)


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """Per cent of the test images, all ten digits, that the model names rightly."""
    return 100 * float((model(images[1]).argmax(dim=1) == images[3]).float().mean())


def show_table(trials: list[Trial], target: float) -> None:
    """One column for each training."""
    table = Table("", title="What each method made of its time", title_justify="left")
    for trial in trials:
        table.add_column(trial.name, justify="right")
    fast, slow = zip(*(trial.rates for trial in trials), strict=True)
    moments = [f"{trial.reached(target):.1f}".replace("inf", "never") for trial in trials]
    table.add_row("steps per second", *(f"{rate:.1f}" for rate in fast))
    table.add_row("… of the slow rank", *(f"{rate:.1f}" for rate in slow))
    table.add_row("accuracy at the end", *(f"{trial.curve[-1][1]:.1f} %" for trial in trials))
    table.add_row(f"seconds to {target:g} %", *moments)
    Console(width=80).print(table)


def summary(trials: list[Trial], options: argparse.Namespace) -> str:
    """What these trainings have shown, in one sentence; others are compared with the first."""
    slower, moments = options.slower, [trial.reached(options.target) for trial in trials]
    slow = f"With one of {bf.size()} ranks {slower:g} times slower"
    told = slow if slower > 1 else f"On {bf.size()} ranks"
    told += f", the average model reaches {options.target:g} % accuracy " + ", ".join(
        f"after {moment:.1f} s with {trial.name}"
        if moment < NEVER
        else f"not within {trial.curve[-1][0]:.0f} s with {trial.name}"
        for trial, moment in zip(trials, moments, strict=True)
    )
    first, soonest, best = trials[0], min(moments), trials[moments.index(min(moments))]
    if len(trials) == 1 or soonest == NEVER:
        return f"{told}."
    if best is first:
        return f"{told}: none is faster than {first.name}."
    times = f"{moments[0] / soonest:.1f} times as fast as {first.name}"
    rates = f"{best.rates[0]:.1f} steps per second instead of {first.rates[0]:.1f}"
    return f"{told}: {best.name} is {times if moments[0] < NEVER else 'first'}, at {rates}."


def save_picture(trials: list[Trial], says: str, options: argparse.Namespace) -> None:
    """Accuracy over time and steps per second; the sentence is the file's description."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    target, end = options.target, max(trial.curve[-1][0] for trial in trials)
    plain = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
    with mpl.rc_context({**plain, "font.size": 12, "axes.titlesize": 12}):
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        right, speed = figure.subplots(1, 2, width_ratios=(2.3, 1))
        right.axhline(target, color="0.6", linewidth=1, linestyle=(0, (5, 4)))
        for number, (trial, (color, style)) in enumerate(zip(trials, STYLES, strict=False)):
            points, reached = zip(*trial.curve, strict=True), trial.reached(target)
            right.plot(*points, style, color=color, linewidth=2, label=trial.name)
            if reached < NEVER:
                line = {"color": color, "linewidth": 1, "markersize": 7, "markevery": [1]}
                right.plot((reached, reached), (0, target), "o-", zorder=3, **line)
                right.text(reached + end / 150, 3 + 8 * number, f"{reached:.1f} s", color=color)
            places = [place + 0.27 * (number - (len(trials) - 1) / 2) for place in (0, 1)]
            bars = speed.bar(places, trial.rates, width=0.25, color=color)
            speed.bar_label(bars, fmt="%.1f", padding=2, fontsize=10)
        right.set(xlabel="seconds", xlim=(0, end), ylim=(0, 100))
        right.set_title("accuracy of the average model on test images, %")
        speed.set_title("steps per second")
        speed.set_xticks((0, 1), (f"the other {bf.size() - 1} ranks", "the slow rank"))
        speed.margins(y=0.1)
        figure.legend(loc="outside lower center", ncols=len(trials), frameon=False)
        field = "Subject" if options.out.suffix == ".pdf" else "Description"
        figure.savefig(options.out, dpi=150, metadata={field: says})


def parse_options() -> argparse.Namespace:
    """What can be chosen on the command line."""
    about, kind = __doc__.partition("\n")[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser("digits.py", description=about, formatter_class=kind)
    add = parser.add_argument
    add("--methods", nargs="+", choices=(*WAITING, *ONE_SIDED), default=list(RATES), help="which")
    add("--slower", type=float, default=10, help="how much longer the last rank's step takes")
    add("--seconds", type=float, default=12, help="of each training")
    add("--step-time", type=float, default=0.02, help="least seconds of a step")
    add("--target", type=float, default=95, help="per cent of the test images to reach")
    add("--split", choices=("images", "digits"), default="images", help="what a rank's share is of")
    add("--lr", type=float, help="step size of all methods, instead of each one's own")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the model is")
    add("--out", type=Path, default=Path("digits.png"), help="picture: png, svg or pdf")
    add("--smoke", action="store_true", help="a second of short steps, to see that it runs")
    options = parser.parse_args()
    for name in ("slower", "seconds", "step_time", "target"):
        if not (got := getattr(options, name)) > 0:
            parser.error(f"argument --{name}: expected a number above 0, got {got}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no GPU here; leave it out")
    if options.smoke:
        options.seconds, options.step_time = 1.0, 0.002
    return options


if __name__ == "__main__":
    main()
