"""Pre-train a small GPT on bytes: a whole training script, on one process or on many.

    python examples/gpt.py                       one process: plain torch
    asyncddp run -np 4 examples/gpt.py           four ranks share each batch and average models
    asyncddp run -np 4 examples/gpt.py --method choco_sgd --compression sign
    asyncddp run -np 4 examples/gpt.py --method diloco --every 10
    asyncddp run -np 4 examples/gpt.py --method muloco --optimizer muon --every 10
    asyncddp run -np 4 examples/gpt.py --method win_put --seconds 30 --straggler 10
    asyncddp run -np 2 examples/gpt.py --steps 300 --resume   go on, on another number of ranks

It has what a real script has: AdamW in two groups, warm-up and a cosine, clipping, accumulation,
an exponential moving average (EMA) of the weights, checkpoints, perplexity on text that nobody
trains on. The text is the source code of Python's standard library, or --data FILE.

``--batch`` counts sequences of a step over all ranks, so that runs on one rank and on many see as
much text in as many steps. ``--seconds`` ends a run by the clock, which is what asynchronous
methods want: a slow rank then makes fewer steps, and nobody waits for it.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import asyncddp as bf
from asyncddp import topology

ONE_SIDED = ("win_put", "pull_get", "push_sum", "async_model_average", "ad_psgd", "a2cid2")
ONE_PEER = ("adapt_then_combine", "adapt_with_combine")  # one neighbour a step, another each time
NO_TEXT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


class Block(nn.Module):
    """Causal self-attention and a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, time, width)`` to the same shape."""
        batch, length, width = x.shape
        heads = self.query_key_value(self.before_attention(x)).view(
            batch, length, 3, self.heads, -1
        )
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """A decoder-only transformer over the 256 bytes, with tied embeddings."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Bytes ``(batch, time)`` to logits of the next byte, ``(batch, time, 256)``."""
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(self.tokens(x) + places)))


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices of hidden layers, AdamW for all other parameters, as one optimizer."""

    def __init__(self, hidden: list[nn.Parameter], others: list[dict[str, Any]], lr: float) -> None:
        muon = torch.optim.Muon(hidden, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        self.parts = muon, torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95))
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> Any:
        """Update all parameters; of the closure, if there is one, return the loss."""
        loss = None if closure is None else closure()
        muon, adamw = self.parts
        muon.state = adamw.state = self.state  # which may have been loaded
        muon.param_groups, adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        muon.step()
        adamw.step()
        return loss


class Stopwatch:
    """Seconds of training; it stands still while all ranks evaluate or save."""

    def __init__(self) -> None:
        self._begun, self._paused = time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._begun - self._paused

    @contextmanager
    def paused(self, together: bool = True) -> Iterator[None]:
        """Stand still on all ranks, or go on where this rank does something alone."""
        begun = time.monotonic()
        yield
        if together:
            bf.barrier()
            self._paused += time.monotonic() - begun


def main() -> None:
    """Train, and write what was measured into the folder of the run."""
    options = parse_options()
    bf.init()
    if options.batch % (bf.size() * options.accumulate):
        sys.exit(
            f"gpt.py: --batch: expected a multiple of {bf.size()} ranks x {options.accumulate} "
            f"accumulated batches, got {options.batch}"
        )
    records = train(options)
    if bf.rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (options.out / "log.jsonl").write_text(lines, encoding="utf-8")


def train(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train with one method, all ranks together; return what rank 0 has measured."""
    torch.manual_seed(options.seed)
    text = read_text(options.data)
    held_out, text = text[: len(text) // 20], text[len(text) // 20 :]
    if len(held_out) <= options.length:
        raise SystemExit(f"argument --data: expected {20 * options.length + 20} bytes or more")
    model = GPT(options.width, options.layers, options.heads, options.length)
    network, optimizer = distributed(options, model)
    network = torch.compile(network) if options.compile else network
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(options.ema))
    sampler = share_of(text, options)
    step = resume(options, model, optimizer, ema, sampler)
    sequences = chain.from_iterable(sampler for _ in count())  # epoch after epoch
    waits = options.method not in ONE_SIDED
    watch, records = Stopwatch(), list[dict[str, Any]]()
    while (progress := progress_of(options, step, watch.seconds)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = options.lr * learning_rate(progress, options.warmup)
        begun = time.monotonic()
        optimizer.zero_grad()
        for _ in range(options.accumulate):
            x, y = batch_of(text, sequences, options)
            (loss_of(network, x, y) / options.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        if bf.rank() == bf.size() - 1:
            time.sleep((options.straggler - 1) * (time.monotonic() - begun))
        optimizer.step()
        ema.update_parameters(model)
        step += 1
        if step % options.evaluate_every == 0 and (waits or bf.rank() == 0):
            seconds = watch.seconds
            with watch.paused(together=waits), bf.average_model(model, wait=waits):
                found = perplexity(model, held_out, options, together=waits)
            records.append(record(step, seconds, found, sent(options, optimizer, step)))
        if options.save_every and step % options.save_every == 0 and waits:
            extra = {"ema": ema.state_dict(), "sampler": sampler.state_dict()}
            with watch.paused():
                bf.save_checkpoint(
                    options.out, model, optimizer, step=step, extra=extra, replicas="all"
                )
    if isinstance(optimizer, bf.DistributedOptimizer):
        optimizer.conclude()  # from here on nobody waits for this rank's next step
    with watch.paused():
        records.append(last_record(options, model, ema, held_out, step, watch.seconds, optimizer))
    return records


def distributed(options: argparse.Namespace, model: GPT) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return what is called and what steps: the lines that make a training script distributed."""
    optimizer = inner_optimizer(options, model)
    if options.method == "alone":
        return model, optimizer
    if options.method == "ddp":
        start_gloo()
        return nn.parallel.DistributedDataParallel(model), optimizer
    settings: dict[str, Any] = {"algorithm": options.method, **options.set}
    if options.method in ONE_PEER:
        settings.setdefault("topology", topology.one_peer_exponential(bf.size()))
    if options.every:
        settings["communication_interval"] = options.every
    elif options.accumulate > 1:  # average once a step, not in each backward pass
        settings["num_steps_per_communication"] = options.accumulate
    if options.compression:
        settings["compression"] = options.compression
    return model, bf.DistributedOptimizer(optimizer, model, **settings)


def inner_optimizer(options: argparse.Namespace, model: GPT) -> torch.optim.Optimizer:
    """Return the optimizer of a rank's own steps: AdamW, or Muon where there are matrices."""
    matrices = [one for one in model.parameters() if one.dim() > 1]
    vectors = [one for one in model.parameters() if one.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    hidden = [one for one in model.blocks.parameters() if one.dim() > 1]
    embeddings = [model.tokens.weight, model.places.weight]
    groups[0] = {"params": embeddings, "weight_decay": 0.1}
    return MuonAdamW(hidden, groups, options.lr)


def start_gloo() -> None:
    """Start torch's process group on all ranks; they meet in a store that rank 0 opens."""
    if torch.distributed.is_initialized():
        return  # torchrun's ranks may have one
    host = bf.broadcast_object(machine_address(), root_rank=0)
    store = torch.distributed.TCPStore(host, 0, is_master=True) if bf.rank() == 0 else None
    port = bf.broadcast_object(store.port if store else None, root_rank=0)
    store = store or torch.distributed.TCPStore(host, port)
    torch.distributed.init_process_group("gloo", store=store, rank=bf.rank(), world_size=bf.size())


def machine_address() -> str:
    """Return the name by which other ranks reach this machine."""
    return "127.0.0.1" if bf.local_size() == bf.size() else socket.getfqdn()


def sent(options: argparse.Namespace, optimizer: torch.optim.Optimizer, step: int) -> int:
    """Return the bytes that this rank has sent to its peers."""
    if options.method != "ddp":
        return getattr(optimizer, "bytes_sent", 0)
    model = sum(one.nbytes for group in optimizer.param_groups for one in group["params"])
    return round(step * model * 2 * (bf.size() - 1) / bf.size())  # a ring's allreduce


def read_text(file: Path | None) -> torch.Tensor:
    """Return a file's bytes, or those of the standard library's modules, as uint8."""
    if file is not None:
        return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = (one for one in sorted(library.rglob("*.py")) if not NO_TEXT & {*one.parts})
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, modules))), dtype=torch.uint8)


def share_of(text: torch.Tensor, options: argparse.Namespace) -> bf.StatefulDistributedSampler:
    """Return the numbers of this rank's sequences: drawn from all, or of a part of the text."""
    sequences = (len(text) - 1) // options.length
    parts = None
    if options.split == "contiguous":  # ranks see different modules
        parts = np.array_split(np.arange(sequences), bf.size())
    return bf.StatefulDistributedSampler(sequences, partition=parts, seed=options.seed)


def batch_of(
    text: torch.Tensor, sequences: Iterator[int], options: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs ``(batch, length)`` and, one byte later, what is to be predicted."""
    samples = options.batch // bf.size() // options.accumulate
    length, starts = options.length, [next(sequences) * options.length for _ in range(samples)]
    x = torch.stack([text[start : start + length] for start in starts])
    y = torch.stack([text[start + 1 : start + 1 + length] for start in starts])
    return x.long(), y.long()


def loss_of(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy, in nats a byte."""
    return F.cross_entropy(network(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def perplexity(
    model: nn.Module, text: torch.Tensor, options: argparse.Namespace, together: bool = True
) -> float:
    """Return exp(loss) on text that nobody trains on; ranks share the work out, or one does all."""
    length = options.length
    count = min(options.evaluate_on, (len(text) - 1) // length)
    starts = torch.arange(count) * ((len(text) - 1) // length // count) * length
    if together:
        starts = starts[bf.rank() :: bf.size()]
    losses = torch.zeros(2)
    for some in starts.split(32):
        x, y = (torch.stack([text[k + i : k + i + length] for k in some]).long() for i in (0, 1))
        losses += torch.tensor([loss_of(model, x, y) * len(some), len(some)])
    if together:
        losses = bf.allreduce(losses, average=False)
    return math.exp(losses[0] / losses[1])


def progress_of(options: argparse.Namespace, step: int, seconds: float) -> float:
    """Return which part of the run is done, by the clock or by steps."""
    return seconds / options.seconds if options.seconds else step / options.steps


def learning_rate(progress: float, warmup: float) -> float:
    """Return the part of the largest step size: a linear warm-up, then a cosine to a tenth."""
    if progress < warmup:
        return (progress + 0.01) / (warmup + 0.01)
    return 0.55 + 0.45 * math.cos(math.pi * (progress - warmup) / (1 - warmup))


def resume(
    options: argparse.Namespace,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    ema: AveragedModel,
    sampler: bf.StatefulDistributedSampler,
) -> int:
    """Go on from the last checkpoint, if there is one; return the steps made."""
    found = bf.load_checkpoint(options.out, model, optimizer) if options.resume else None
    if found is None:
        return 0
    if found.exact:  # as many ranks: each goes on from its own
        ema.load_state_dict(found.extra["ema"])
    sampler.load_state_dict(found.extra["sampler"])
    say(f"resumed after step {found.step} of {found.manifest['world_size']} ranks")
    return found.step


def record(step: int, seconds: float, found: float, bytes_sent: int) -> dict[str, Any]:
    """Return a line of the log, and print it on rank 0."""
    say(
        f"step {step:5}  {seconds:6.1f} s  {bytes_sent / 1e6:8.2f} MB sent  perplexity {found:6.2f}"
    )
    return {"step": step, "seconds": seconds, "bytes": bytes_sent, "perplexity": found}


def last_record(
    options: argparse.Namespace,
    model: GPT,
    ema: AveragedModel,
    held_out: torch.Tensor,
    step: int,
    seconds: float,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Judge the average of all ranks' models, and that of their moving averages."""
    steps, distance = bf.allgather_object(step), bf.consensus_distance(model)
    own = perplexity(model, held_out, options)  # of each rank's replica, on its part
    with bf.average_model(model):
        found = perplexity(model, held_out, options)
    with bf.average_model(ema):
        smooth = perplexity(ema, held_out, options)
    last = record(step, seconds, found, sent(options, optimizer, step))
    say(f"moving average {smooth:.2f}, replicas {own:.2f}, {distance:.2g} apart; steps {steps}")
    return {**last, "ema": smooth, "own": own, "distance": distance, "steps": steps}


def say(text: str) -> None:
    """Print on rank 0."""
    if bf.rank() == 0:
        print(text, flush=True)


def setting(text: str) -> tuple[str, Any]:
    """Read ``name=value``."""
    name, given, value = text.partition("=")
    if not name or not given:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="gpt.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--method", default="adapt_then_combine", help="any algorithm, ddp or alone (%(default)s)")
    add("--every", type=int, help="steps between averages, for methods that communicate rarely")
    add("--compression", help="compressor of messages, such as sign, qsgd_int8, bf16")
    add(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another argument of the method, such as outer_lr=0.7; may be repeated",
    )
    add(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="of a rank's steps; torch.optim.Muon is in torch 2.9 or later (%(default)s)",
    )
    add("--steps", type=int, default=200, help="optimizer steps of each rank (%(default)s)")
    add("--seconds", type=float, help="train by the clock in place of --steps")
    add("--batch", type=int, default=32, help="sequences of a step, over all ranks (%(default)s)")
    add("--accumulate", type=int, default=1, help="backward passes a step (%(default)s)")
    add("--lr", type=float, default=8e-3, help="largest step size (%(default)s)")
    add("--warmup", type=float, default=0.1, help="part of the run (%(default)s)")
    add("--clip", type=float, default=1.0, help="norm of the gradient (%(default)s)")
    add("--ema", type=float, default=0.98, help="decay of the moving average (%(default)s)")
    add("--length", type=int, default=64, help="bytes of a sequence (%(default)s)")
    add("--width", type=int, default=64, help="of the model (%(default)s)")
    add("--layers", type=int, default=2, help="of the model (%(default)s)")
    add("--heads", type=int, default=4, help="of attention (%(default)s)")
    add("--data", type=Path, metavar="FILE", help="text; by default the standard library's sources")
    add(
        "--split",
        choices=("shuffled", "contiguous"),
        default="shuffled",
        help="ranks draw from all of the text, or each from a part of its own (%(default)s)",
    )
    add("--straggler", type=float, default=1.0, help="times as slow the last rank is (%(default)s)")
    add("--compile", action="store_true", help="call the model through torch.compile")
    add("--evaluate-every", type=int, default=50, help="steps (%(default)s)")
    add("--evaluate-on", type=int, default=512, help="sequences (%(default)s)")
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0 for none")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    add("--out", type=Path, default=Path("gpt"), help="folder of log and checkpoints (%(default)s)")
    add("--seed", type=int, default=0, help="of weights and text (%(default)s)")
    add("--smoke", action="store_true", help="a few steps of a tiny model, to see that it runs")
    if parser.parse_known_args(words)[0].smoke:
        parser.set_defaults(width=16, layers=1, steps=8, evaluate_every=4, evaluate_on=32)
    options = parser.parse_args(words)
    options.set = dict(options.set)
    if options.straggler < 1:
        parser.error(f"argument --straggler: expected at least 1, got {options.straggler}")
    return options


if __name__ == "__main__":
    main()
