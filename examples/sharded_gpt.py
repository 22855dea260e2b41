"""Train a GPT whose replicas are sharded by FSDP2, and average them by gossip, DiLoCo or HSDP.

    asyncddp run -np 4 examples/sharded_gpt.py --replicas 2 --shards 2 --method diloco --every 10
    torchrun --nproc-per-node 4 examples/sharded_gpt.py --replicas 2 --shards 2 --method one_peer
    asyncddp run -np 4 examples/sharded_gpt.py --replicas 2 --shards 2 --method hsdp

Each replica is one model in ``--shards`` parts. Inside a replica FSDP2 gathers and reduces, as it
always does. Between replicas each rank talks to those that hold the same part as it: every step
with one neighbour, parameters (``one_peer``) or one bit of each difference (``choco_sgd``); every
``--every`` steps with a neighbour (``noloco``) or with all (``diloco``). ``hsdp`` is torch's own
way, which averages gradients of each step over all replicas.
The text is what Python's ``help()`` shows, so that nothing is fetched.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import asyncddp as bf

METHODS: dict[str, dict[str, Any]] = {  # arguments of DistributedOptimizer; None is --every
    "diloco": {"algorithm": "diloco", "communication_interval": None},
    "noloco": {"algorithm": "noloco", "communication_interval": None},
    "one_peer": {"algorithm": "adapt_then_combine", "topology": "one_peer_exponential"},
    "choco_sgd": {"algorithm": "choco_sgd", "compression": "sign"},
    "hsdp": {},
}
HELD_OUT = 40_000  # bytes


class Block(nn.Module):
    """Causal self-attention and a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, time, width)`` to the same shape."""
        batch, length, width = x.shape
        parts = self.query_key_value(self.before_attention(x)).chunk(3, -1)
        heads = (one.view(batch, length, self.heads, -1).transpose(1, 2) for one in parts)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class GPT(nn.Module):
    """A decoder-only transformer over the 256 bytes."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Bytes ``(batch, time)`` to logits of the next byte, ``(batch, time, 256)``."""
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(self.tokens(x) + places)))


def main() -> None:
    """Train, and print on rank 0 what the method has cost and what it has given."""
    train(parse_options())
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train with one method, all ranks together; return what was reported."""
    bf.init()
    start_gloo()
    if bf.size() != options.replicas * options.shards:
        raise SystemExit(
            f"sharded_gpt.py: expected {options.replicas} replicas x {options.shards} shards = "
            f"{options.replicas * options.shards} ranks, got {bf.size()}; start as many, or give "
            "--replicas and --shards"
        )
    shape = options.replicas, options.shards
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8).long()
    torch.manual_seed(options.seed)
    model = GPT(options.width, options.layers, options.heads, options.length)
    parameters = sum(one.numel() for one in model.parameters())
    shard_over = mesh if options.method == "hsdp" else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=shard_over)
    fully_shard(model, mesh=shard_over)
    optimizer = optimizer_of(options, model, mesh)
    begun = time.monotonic()
    for step, (x, y) in enumerate(batches(text[:-HELD_OUT], options), 1):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % options.log_every == 0:
            mean = float(bf.allreduce(loss.detach()))
            tell(f"step {step:5d}  loss {mean:.3f}  {time.monotonic() - begun:.1f} s")
    return report(options, model, optimizer, mesh, text[-HELD_OUT:], parameters)


def optimizer_of(
    options: argparse.Namespace, model: nn.Module, mesh: DeviceMesh
) -> torch.optim.Optimizer:
    """Return the optimizer: the lines that make replicas average, other than by FSDP2 itself."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    if options.method == "hsdp":
        return optimizer
    settings = {
        name: options.every if value is None else value
        for name, value in METHODS[options.method].items()
    }
    return bf.DistributedOptimizer(optimizer, model, mesh=mesh["replica"], **settings)


def report(
    options: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    held_out: torch.Tensor,
    parameters: int,
) -> dict[str, float]:
    """Print loss on held-out text, bytes that went between replicas, and the replicas' distance."""
    n = options.replicas
    sent = 2 * (n - 1) / n * 4 * parameters / options.shards * options.steps  # a ring's allreduce
    distance = 0.0
    if isinstance(optimizer, bf.DistributedOptimizer):
        sent = optimizer.bytes_sent
        distance = bf.consensus_distance(model, mesh=mesh["replica"])
        with bf.average_model(model, mesh=mesh["replica"]):
            loss = evaluate(model, held_out, options)
    else:
        loss = evaluate(model, held_out, options)
    tell(
        f"{options.method}: {n} replicas x {options.shards} shards, {parameters} parameters, "
        f"{options.steps} steps: held-out loss {loss:.3f}, perplexity {math.exp(loss):.2f}, "
        f"{sent / options.steps / 1e6:.4f} MB between replicas for a rank and step, "
        f"distance {distance:.3g}"
    )
    return {"parameters": parameters, "loss": loss, "bytes": sent / options.steps}


@torch.no_grad()
def evaluate(model: nn.Module, held_out: torch.Tensor, options: argparse.Namespace) -> float:
    """Return the mean loss on held-out text; all ranks evaluate the same, as FSDP2 needs."""
    count = min(len(held_out) // (options.length + 1), 8 * options.batch)
    rows = held_out[: count * (options.length + 1)].view(count, -1)
    return float(loss_of(model, rows[:, :-1], rows[:, 1:]))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next bytes."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def batches(
    text: torch.Tensor, options: argparse.Namespace
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of this rank, each from places drawn at random."""
    generator = torch.Generator().manual_seed(1000 * (1 + options.seed) + bf.rank())
    for _ in range(options.steps):
        limit = len(text) - options.length - 1
        starts = torch.randint(limit, (options.batch,), generator=generator).tolist()
        rows = torch.stack([text[start : start + options.length + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]


def read_text() -> bytes:
    """Return the texts of Python's help: 0.5 MB of English with code in it."""
    return "\n".join(pydoc_data.topics.topics.values()).encode()


def start_gloo() -> None:
    """Start torch's process group, which FSDP2 needs; ranks meet in a store that rank 0 opens."""
    if dist.is_initialized():
        return
    here = "127.0.0.1" if bf.local_size() == bf.size() else socket.getfqdn()
    host = bf.broadcast_object(here, root_rank=0)
    store = dist.TCPStore(host, 0, is_master=True) if bf.rank() == 0 else None
    port = bf.broadcast_object(store.port if store else None, root_rank=0)
    store = store or dist.TCPStore(host, port)
    dist.init_process_group("gloo", store=store, rank=bf.rank(), world_size=bf.size())


def tell(line: str) -> None:
    """Print a line on rank 0."""
    if bf.rank() == 0:
        print(line, flush=True)


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2, help="ranks of a replica")
    parser.add_argument("--method", choices=[*METHODS], default="diloco")
    parser.add_argument("--every", type=int, default=10, help="steps between averages")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
    options = parser.parse_args(words)
    if options.smoke:
        options.steps, options.batch, options.every, options.log_every = 8, 2, 2, 4
        options.width, options.layers, options.length = 16, 1, 16
    return options


if __name__ == "__main__":
    main()
