"""Four ranks train a GPT, one is killed, another process takes its place: nobody stops.

    asyncddp run --elastic --restarts 1 -np 4 examples/kill.py
    asyncddp run --elastic --restarts 1 -np 4 examples/kill.py --out kill.png
    asyncddp run --elastic --restarts 1 -np 4 examples/kill.py --method gradient_allreduce

Rank 2 sends itself SIGKILL, as the kernel does where memory runs out. The others see it within
milliseconds, agree on who is left, draw the graph for three, and make the next step. The command
starts a new process, which takes a rank's state and makes the same steps from then on. No step is
lost or made again, and no checkpoint is read. The table shows it, and with --out a picture.

The text is Python's own library, as bytes. It takes half a minute on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

import asyncddp as bf

LENGTH, WIDTH, HEADS = 64, 64, 4
EVERY = 10  # steps between two evaluations


class GPT(nn.Module):
    """Two transformer blocks over bytes, each of which sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH,
            HEADS,
            4 * WIDTH,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the byte after each byte of ``x``, of shape (batch, length)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.blocks(self.bytes(x) + self.places.weight, mask, is_causal=True))


@dataclass
class History:
    """What the lowest rank has seen: the times of all steps, and the loss now and then."""

    seconds: list[float] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    first: int = 0

    def changes(self) -> list[tuple[int, int, int]]:
        """Return each step in which other ranks took part than before, with their numbers."""
        pairs = enumerate(itertools.pairwise(self.members), self.first + 1)
        return [(step, before, after) for step, (before, after) in pairs if before != after]


def read_text() -> torch.Tensor:
    """Return the bytes of some modules of Python's library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


def loss_of(model: nn.Module, text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the mean cross-entropy of 16 passages, in nats a byte."""
    starts = torch.randint(len(text) - LENGTH - 1, (16,), generator=generator)
    passages = torch.stack([text[start : start + LENGTH + 1] for start in starts]).long()
    logits = model(passages[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), passages[:, 1:].flatten())


def evaluate(model: nn.Module, text: torch.Tensor) -> float:
    """Return the average model's loss on text that nobody trains on; collective."""
    with bf.average_model(model), torch.no_grad():
        return loss_of(model, text, torch.Generator().manual_seed(0)).item()


def train(options: argparse.Namespace) -> History:
    """Train until some steps after a process has joined, or four times as many in all."""
    bf.init(elastic=True)
    torch.manual_seed(0)
    text, model, history = read_text(), GPT(), History()
    trained, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = bf.DistributedOptimizer(adam, model, algorithm=options.method)
    state = bf.ElasticState(model, optimizer)
    if state.joined:
        print(f"rank {bf.rank()}: a new process goes on with step {state.step}", flush=True)
    history.first, begun, stop = state.step, time.monotonic(), 4 * options.steps
    for step in state.steps(4 * options.steps):
        if (bf.rank(), step) == (options.victim, options.kill_at) and not state.joined:
            os.kill(os.getpid(), signal.SIGKILL)
        if step > options.kill_at and bf.view().joined:
            stop = min(stop, step + options.steps)
        optimizer.zero_grad()
        loss_of(model, trained, torch.Generator().manual_seed(64 * step + bf.rank())).backward()
        optimizer.step()
        history.seconds.append(time.monotonic() - begun)
        history.members.append(bf.size())
        if step % EVERY == 0:
            history.losses[step] = evaluate(model, held_out)
        if step >= stop:
            break
    return history


def show(history: History) -> None:
    """Print who took part, and what the loss was before and after."""
    table = Table("steps", "ranks", "seconds", "loss at the end", title="A run that loses a rank")
    last = history.first + len(history.members)
    ends = [step for step, _, _ in history.changes()] + [last]
    for begin, end in zip([history.first, *ends], ends, strict=False):
        place = end - history.first - 1
        loss = [history.losses[step] for step in history.losses if step < end][-1:]
        told = f"{loss[0]:.3f}" if loss else ""
        members = str(history.members[place])
        table.add_row(f"{begin} to {end - 1}", members, f"{history.seconds[place]:.1f}", told)
    Console().print(table)
    steps = [after - before for before, after in itertools.pairwise(history.seconds)]
    usual = sorted(steps)[len(steps) // 2]
    for step, before, after in history.changes():
        took = steps[step - history.first - 1]
        print(
            f"From step {step} on {after} ranks in place of {before}: that step took "
            f"{took * 1e3:.0f} ms, and the median step {usual * 1e3:.0f} ms"
        )


def draw(history: History, file: Path) -> None:
    """Draw the loss over time, with marks where ranks left and came."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    times = [history.seconds[step - history.first] for step in history.losses]
    axes.plot(times, [*history.losses.values()], color="tab:blue")
    for step, before, after in history.changes():
        what, color = ("dies", "tab:red") if after < before else ("joins", "tab:green")
        axes.axvline(history.seconds[step - history.first], color=color, linestyle="--")
        place = (history.seconds[step - history.first], max(history.losses.values()))
        axes.annotate(f" a rank {what}", place, color=color, va="top")
    axes.set(xlabel="seconds", ylabel="loss of the average model, nats a byte")
    figure.savefig(file, dpi=120)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Kill a rank of four, and train on.")
    parser.add_argument("--method", default="adapt_then_combine", help="[adapt_then_combine]")
    parser.add_argument("--steps", type=int, default=100, help="after the new rank's first [100]")
    parser.add_argument("--kill-at", type=int, default=40, help="step of the death [40]")
    parser.add_argument("--victim", type=int, default=2, help="rank that dies [2]")
    parser.add_argument("--out", type=Path, help="draw the loss into this file")
    parser.add_argument("--smoke", action="store_true", help="few steps, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.kill_at = 20, 10
    return options


def main() -> None:
    """Train, and show on the lowest rank what happened."""
    options = parse_options()
    history = train(options)
    if bf.rank() == bf.view().members[0]:
        show(history)
        if options.out is not None:
            draw(history, options.out)


if __name__ == "__main__":
    main()
