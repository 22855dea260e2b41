"""Your model, your links, your ranks: samples per second and bytes of each method, beside DDP.

    asyncddp run -np 4 examples/benchmark.py --model gpt
    torchrun --nproc-per-node 4 examples/benchmark.py --model mine.py:build --out benchmark.png
    asyncddp run -np 8 -H node1:4,node2:4 examples/benchmark.py --device cuda --methods ddp win_put

``mine.py:build`` is a function of yours without arguments. It returns ``(model, make_batch)``; then
``make_batch()`` gives ``(inputs, targets)`` and the loss is the cross entropy of ``model(inputs)``.
Or it returns ``(model, make_batch, loss)``; then ``make_batch()`` gives any tuple of tensors and
``loss(model, batch)`` what you minimise. Each rank has one batch, so that loading is not timed.

A method is ``local`` (no communication), ``ddp`` (torch's DistributedDataParallel), or a name that
``bf.DistributedOptimizer(algorithm=...)`` takes, as ``name:compression`` if you like. The methods
take turns, so that what else the machine does meets all of them; the table has the median turn, the
least and the most. Each method keeps a model of its own: name fewer where memory is short.
"""

from __future__ import annotations

import argparse
import os
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS

METHODS = (
    "local ddp gradient_allreduce adapt_then_combine adapt_with_combine choco_sgd:sign win_put"
)
ONE_PEER = ("adapt_then_combine", "adapt_with_combine")  # others get a graph by their own default
TURNS, LIMIT = 5, 100  # turns of each method; seconds after which no new ones begin
Made = tuple[nn.Module, Callable[[], tuple[torch.Tensor, ...]]]


def mlp() -> Made:
    """Three layers, 1.3 million parameters: what a function of yours may look like."""
    layers = (nn.Linear(256, 768), nn.ReLU(), nn.Linear(768, 1280), nn.ReLU(), nn.Linear(1280, 100))
    return nn.Sequential(*layers), lambda: (torch.randn(128, 256), torch.randint(100, (128,)))


class Causal(nn.TransformerEncoderLayer):
    """A layer of a transformer in which a byte sees those before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Apply it, behind a mask."""
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return super().forward(x, src_mask=later, is_causal=True)


def gpt() -> Made:
    """Four causal layers that predict the next byte, 3.3 million parameters."""
    layers = [Causal(256, 4, 1024, 0.0, batch_first=True, norm_first=True) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(256, 256), *layers, nn.Linear(256, 256), nn.Flatten(0, 1))
    return model, lambda: (torch.randint(256, (4, 64)), torch.randint(256, (4 * 64,)))


class Residual(nn.Sequential):
    """Layers, and the way around them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both ways."""
        return F.relu(x + super().forward(x))


def resnet() -> Made:
    """Eight residual convolutions, 1.2 million parameters."""
    layers = ((nn.Conv2d(128, 128, 3, padding=1), nn.BatchNorm2d(128)) for _ in range(8))
    blocks = [Residual(*pair) for pair in layers]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    model = nn.Sequential(nn.Conv2d(3, 128, 7, 4, padding=3), nn.ReLU(), *blocks, *head)
    return model, lambda: (torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))


def cross_entropy(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """The loss of models that come without one."""
    return F.cross_entropy(model(batch[0]), batch[1])


class Rival:
    """A model that one method trains, and how fast that was in each turn."""

    def __init__(self, method: str, options: argparse.Namespace) -> None:
        self.method, self.rates, self.steps = method, list[float](), 0
        torch.manual_seed(0)  # the same model on all ranks …
        model, make_batch, *loss = options.model()
        torch.manual_seed(1 + bf.rank())  # … and other data
        self.batch = [part.to(options.device) for part in make_batch()]
        self.loss = loss[0] if loss else cross_entropy
        self.model = model.to(options.device)
        self.nbytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        algorithm, _, compression = method.partition(":")
        if method == "ddp" and bf.size() > 1:
            self.model = nn.parallel.DistributedDataParallel(model)
        elif method not in ("local", "ddp"):
            graph = options.topology or ("one_peer_exponential" if method in ONE_PEER else None)
            self.optimizer = bf.DistributedOptimizer(
                self.optimizer, model, algorithm, topology=graph, compression=compression or None
            )

    def run(self, steps: int) -> float:
        """Make steps on all ranks together; the seconds of one."""
        bf.barrier()
        begun = time.monotonic()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss(self.model, self.batch).backward()
            self.optimizer.step()
        if self.batch[0].is_cuda:
            torch.cuda.synchronize()
        bf.barrier()
        self.steps += steps
        return (time.monotonic() - begun) / steps

    def megabytes(self) -> float:
        """What a rank has sent in a step, on average; all ranks ask for it together."""
        if self.method == "ddp":  # by the formula of a ring: torch does not count
            return 2 * (bf.size() - 1) / bf.size() * self.nbytes / 1e6
        sent = float(getattr(self.optimizer, "bytes_sent", 0))
        return bf.allreduce(torch.tensor(sent, dtype=torch.float64)).item() / self.steps / 1e6


def main() -> None:
    """Measure all methods in turns, then say and draw what came of it."""
    options = parse_options()
    bf.init()
    backend = "gloo"
    if options.device == "cuda":
        torch.cuda.set_device(bf.local_rank() % torch.cuda.device_count())
        backend = "nccl" if bf.local_size() <= torch.cuda.device_count() else "gloo"
    if "ddp" in options.methods and bf.size() > 1:
        if bf.local_size() == bf.size():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend)  # finds the others by what both launchers announce
    rivals = [Rival(method, options) for method in options.methods]
    measure(rivals, min(options.seconds, LIMIT / len(rivals)) / TURNS)
    sent = [rival.megabytes() for rival in rivals]
    if bf.rank() == 0:
        show_table(rivals, sent, backend)
        if options.out:
            save_picture(rivals, sent, options.out)
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(rivals: list[Rival], seconds: float) -> None:
    """Let all rivals take turns of so many seconds; rank 0 says how many steps that is."""
    begun, steps = time.monotonic(), {}
    for rival in rivals:
        rival.run(2)  # a warm-up
        steps[rival] = bf.broadcast_object(max(1, round(seconds / rival.run(2))))
    for turn in range(TURNS):
        if bf.broadcast_object(turn > 0 and time.monotonic() - begun > LIMIT):
            break
        for place in range(len(rivals)):
            rival = rivals[(turn + place) % len(rivals)]  # another one begins in each turn
            rival.rates.append(bf.size() * len(rival.batch[0]) / rival.run(steps[rival]))
        if bf.rank() == 0:
            told = ", ".join(f"{rival.method} {rival.rates[-1]:,.0f}" for rival in rivals)
            print(f"turn {turn + 1} of {TURNS}, samples/s: {told}", flush=True)


def show_table(rivals: list[Rival], sent: list[float], backend: str) -> None:
    """One line for each method, and what else there is to know."""
    table = Table("", title=f"{rivals[0].nbytes / 1e6:.2f} MB of parameters, {bf.size()} ranks")
    first = next((rival for rival in rivals if rival.method == "ddp"), rivals[0])
    for column in ("samples/s", "least", "most", f"beside {first.method}", "MB a step and rank"):
        table.add_column(column, justify="right")
    for rival, megabytes in zip(rivals, sent, strict=True):
        rates = (median(rival.rates), min(rival.rates), max(rival.rates))
        beside = f"{rates[0] / median(first.rates):.2f} x"
        table.add_row(rival.method, *(f"{r:,.0f}" for r in rates), beside, f"{megabytes:.3f}")
    Console(width=100).print(table)
    if bf.size() == 1:
        print("One rank communicates nothing, by ddp neither: asyncddp run -np 4 starts four.")
    elif first.method == "ddp":
        print(f"ddp is on {backend}; its bytes are 2 (n - 1) / n of the gradients', as in a ring.")


def save_picture(rivals: list[Rival], sent: list[float], out: Path) -> None:
    """Samples per second, with the least and the most, beside bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 0.4 * len(rivals)), layout="constrained")
    speed, traffic = figure.subplots(1, 2, sharey=True)
    for rival, megabytes in zip(rivals, sent, strict=True):
        speed.barh(rival.method, median(rival.rates), color="#0072B2")
        speed.plot((min(rival.rates), max(rival.rates)), (rival.method,) * 2, "|-", color="0.3")
        traffic.barh(rival.method, megabytes, color="#E69F00")
    speed.set(xlabel=f"samples per second of {bf.size()} ranks, least to most", xlim=(0, None))
    traffic.set(xlabel="MB that a rank sends in a step")
    speed.invert_yaxis()
    figure.savefig(out, dpi=100)
    print(f"The picture is {out}.")


def model_of(given: str) -> Callable[[], Any]:
    """The function that makes the model: one of this file, or of another."""
    file, _, name = given.rpartition(":")
    known: dict[str, Any] = {"mlp": mlp, "gpt": gpt, "resnet": resnet}
    made = known.get(given) or (runpy.run_path(file).get(name) if Path(file).is_file() else None)
    if not callable(made):
        wanted = "mlp, gpt, resnet or FILE.py:function, of a file that has such a function"
        raise argparse.ArgumentTypeError(f"expected {wanted}, got {given!r}")
    return made


def method_of(given: str) -> str:
    """The name of a method, if there is one."""
    known = ("local", "ddp", *sorted(ALGORITHMS))
    if given.partition(":")[0] not in known:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, got {given!r}")
    return given


def parse_options() -> argparse.Namespace:
    """What can be chosen on the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmark.py", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--model", type=model_of, default=mlp, help="mlp, gpt, resnet or FILE.py:function (mlp)")
    add("--methods", nargs="+", type=method_of, default=METHODS.split(), metavar="METHOD")
    add("--topology", help="of all methods with neighbours, such as ring; else each one's own")
    add("--seconds", type=float, default=10, help="of each method (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the models are")
    add("--out", type=Path, help="picture: png, svg or pdf")
    add("--smoke", action="store_true", help="a few steps, to see that it runs")
    options = parser.parse_args()
    options.seconds = 0.1 if options.smoke else options.seconds
    if not options.seconds > 0:
        parser.error(f"argument --seconds: expected a number above 0, got {options.seconds}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no GPU here; leave it out")
    return options


if __name__ == "__main__":
    main()
