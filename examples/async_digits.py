"""One rank is ten times slower than the others; who has to wait for it?

    asyncddp run -np 4 examples/async_digits.py --straggler 3

The same model is trained four times for the same wall time, synchronously and asynchronously, on
equal ranks and with a straggler. Synchronous neighbours wait for it in every step; others mix with
what it has published last. A table and a picture compare steps per second, accuracy over wall time,
and how far behind the mixed models were. Where fast ranks lose more than a fifth of their steps, or
the asynchronous average model ends more than 1.5 points of accuracy behind the synchronous one that
had no straggler, the script says so and fails.

Every step takes at least ``--step-time`` seconds: the ranks of this example compute little and wait
for the rest, as a processor waits for its accelerator, so that few cores can stand for many.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from support.async_report import Mark, Trial, save_picture, show_table
from support.data import Digits, read_digits

import asyncddp as bf

KEPT = 0.8  # share of their steps that fast ranks keep beside a straggler
MARGIN = 1.5  # points of accuracy by which the asynchronous model may fall behind
MARKS = 40  # how often models are put aside to be judged afterwards
SLOWER = 10  # how many times longer a straggler's step takes


def main() -> None:
    """Train three times, compare, and fail in words where waiting was not avoided."""
    options = parse_options()
    bf.init()
    if options.straggler not in range(bf.size()):
        fail(f"--straggler {options.straggler}: the ranks are 0 to {bf.size() - 1}")
    digits = bf.broadcast_object(read_digits() if bf.rank() == 0 else None, root_rank=0)
    trials = [
        train(digits, options, sync=sync, straggler=straggler)
        for straggler in (None, options.straggler)
        for sync in (True, False)
    ]
    if bf.rank() == 0:
        show_table(trials, options.straggler)
        save_picture(trials, options.straggler, options.out)
        print(f"The curves are in {options.out}.")
    if not options.smoke:
        judge(trials, options.straggler)


def judge(trials: list[Trial], straggler: int) -> None:
    """Fail where the straggler has cost the others too much, or the model its accuracy."""
    sync, equal, _, free = trials
    fast = [rank for rank in range(bf.size()) if rank != straggler]
    kept = min(free.rates[rank] / equal.rates[rank] for rank in fast)
    if kept < KEPT:
        fail(f"a fast rank kept {kept:.0%} of its steps beside the straggler, not {KEPT:.0%}")
    behind = sync.accuracy - free.accuracy
    if behind > MARGIN:
        fail(f"the asynchronous model is {behind:.1f} points behind, more than {MARGIN}")


def train(
    digits: Digits, options: argparse.Namespace, *, sync: bool, straggler: int | None
) -> Trial:
    """Train for some seconds; all ranks call this together."""
    torch.manual_seed(options.seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    bf.broadcast_parameters(model, root_rank=0)
    optim_fn = partial(bf.optim_fn_adam, lr=options.lr)
    ddp = bf.DecentralizedDataParallel(model, optim_fn, sync=sync)
    dataset = torch.utils.data.TensorDataset(digits.inputs, digits.labels)
    size = 256 // bf.size() + 20 * bf.rank()
    sampler = bf.LocalStepRandomBatchSampler(dataset, size, options.seed)
    pause = options.step_time * (SLOWER if bf.rank() == straggler else 1)
    ages: Counter[int] = Counter()
    marks: list[Mark] = []
    steps, batches = 0, iter(sampler)
    bf.barrier()
    start = time.monotonic()
    while not over(start + options.seconds, sync=sync):
        begun = time.monotonic()
        batch = next(batches, None)
        if batch is None:
            batches = iter(sampler)
            batch = next(batches)
        images, labels = digits.inputs[batch], digits.labels[batch]
        F.cross_entropy(ddp(images), labels).backward()
        steps += 1
        time.sleep(max(0.0, begun + pause - time.monotonic()))
        ages.update(read_ages())
        elapsed = time.monotonic() - start
        if elapsed >= options.seconds * len(marks) / MARKS:
            marks.append(Mark(elapsed, copied(model)))
    rate = steps / (time.monotonic() - start)
    bf.barrier()
    marks.append(Mark(options.seconds, copied(model)))
    ddp.close()
    curve = judged(marks, model, digits, options.seconds)
    title = f"{'sync' if sync else 'async'}, {'equal' if straggler is None else 'slow'}"
    return Trial(title, bf.allgather_object(rate), curve, bf.allgather_object(ages))


@torch.no_grad()
def copied(model: torch.nn.Module) -> torch.Tensor:
    """All parameters in one flat tensor."""
    return torch.nn.utils.parameters_to_vector(model.parameters())


def over(deadline: float, *, sync: bool) -> bool:
    """Whether to stop; synchronous ranks, which need each other, agree about it."""
    late = time.monotonic() > deadline
    if not sync:
        return late
    return bool(bf.allreduce(torch.tensor([float(late)]), average=False) > 0)


def read_ages() -> list[int]:
    """By how many steps the neighbours were behind this rank, in what was mixed last."""
    names = bf.get_current_created_window_names()[:1]  # all buckets travel alike
    return [max(0, age.lag) for name in names for age in bf.win_staleness(name).values()]


@torch.no_grad()
def judged(
    marks: list[Mark], model: torch.nn.Module, digits: Digits, seconds: float
) -> list[tuple[float, float]]:
    """The accuracy of the average of all ranks' models over time, from what they put aside."""
    moments = [seconds * number / MARKS for number in range(MARKS + 1)]
    latest = [
        max((m for m in marks if m.seconds <= t), key=_time, default=marks[0]) for t in moments
    ]
    averages = bf.allreduce(torch.stack([mark.parameters for mark in latest]))
    curve = []
    for moment, average in zip(moments, averages, strict=True):
        torch.nn.utils.vector_to_parameters(average, model.parameters())
        right = (model(digits.test_inputs).argmax(dim=1) == digits.test_labels).float().mean()
        curve.append((moment, 100 * float(right)))
    return curve


def _time(mark: Mark) -> float:
    return mark.seconds


def fail(words: str) -> NoReturn:
    """End all ranks; rank 0 says why, and gives the run its exit code 1."""
    sys.exit(f"async_digits.py: {words}" if bf.rank() == 0 else 0)


def parse_options() -> argparse.Namespace:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(prog="async_digits.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--straggler", type=int, default=0, help="the slow rank (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of each of the four trainings (%(default)s)"
    )
    parser.add_argument(
        "--step-time", type=float, default=0.02, help="least seconds of a step (%(default)s)"
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="step size of Adam (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="2 seconds, to see that it runs")
    parser.add_argument(
        "--out", type=Path, default=Path("async_digits.png"), help="picture (%(default)s)"
    )
    options = parser.parse_args()
    if options.smoke:
        options.seconds = 2.0
    return options


if __name__ == "__main__":
    main()
