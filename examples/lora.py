"""Low-rank adapters of a language model, averaged by ranks that have read different texts.

    asyncddp run -np 4 examples/lora.py
    torchrun --nproc-per-node 4 examples/lora.py
    python examples/lora.py

All texts are in Python's own help, ``pydoc_data.topics``. A small transformer learns to predict the
bytes of most topics; all ranks train it together. Then it is frozen, and each of its matrices gets
an adapter of low rank, the only numbers that are trained and sent from now on:

    y = W x + (alpha / rank) B A x,   A of shape (rank, inputs), B of shape (outputs, rank), B = 0

The base has not seen the topics of ``GROUPS``, and each rank now trains on one group of them. Two
times all ranks begin with the same adapters and make the same number of steps:

    alone      each rank by itself, by plain torch; at the end their adapters can be averaged
    averaged   adapters are averaged with neighbours in each step, by ``--method``

A table shows the loss on the end of each group, which nobody has trained on: alone a rank knows its
own group. Averaging A and B is not averaging B A; but it is nearly so while the ranks stay near
each other, which is why adapters that were averaged in each step are better than those averaged in
the end.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS

GROUPS = {
    "methods": ("specialnames",),
    "statements": ("compound",),
    "strings": ("formatstrings", "string-methods"),
    "debugger": ("debugger",),
}
"""Topics by the name of their group: the data of the ranks 0, 1, 2, 3, and of 4, 5, … again."""

MATRICES = ("qkv", "out", "up", "down")  # of a block: those that get an adapter


class Block(torch.nn.Module):
    """Attention to earlier bytes, and a network for each byte."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both, each added to its input."""
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(torch.nn.Module):
    """A transformer that gives the logits of the byte after each byte."""

    def __init__(self, context: int, width: int, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.context = context
        self.byte, self.place = torch.nn.Embedding(256, width), torch.nn.Embedding(context, width)
        self.blocks = torch.nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 256))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits, (batch, time, 256), of bytes, (batch, time)."""
        return self.head(self.blocks(self.byte(text) + self.place.weight[: text.shape[1]]))

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """Mean nats of a byte in pieces of text, (batch, context + 1)."""
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


class Adapter(torch.nn.Module):
    """A frozen matrix, and what is learnt beside it: two thin ones."""

    def __init__(self, frozen: torch.nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.frozen, self.scale = frozen, alpha / rank
        self.a = torch.nn.Parameter(torch.randn(rank, frozen.in_features) / rank)
        self.b = torch.nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """W x + scale B A x."""
        return self.frozen(x) + self.scale * (x @ self.a.T @ self.b.T)


def add_adapters(model: GPT, rank: int, alpha: float) -> list[torch.nn.Parameter]:
    """Freeze the model, give each matrix of its blocks an adapter, and return these alone."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in MATRICES:
            setattr(block, name, Adapter(getattr(block, name), rank, alpha))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def read_texts() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Bytes of the base's topics, with no paragraph of the groups in them; and of each group."""
    groups = ["\n\n".join(topics[name] for name in names) for names in GROUPS.values()]
    known = {paragraph.strip() for group in groups for paragraph in group.split("\n\n")}
    paragraphs = {part: None for name in sorted(topics) for part in topics[name].split("\n\n")}
    base = "\n\n".join(part for part in paragraphs if part.strip() not in known)
    every = [
        torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for text in (base, *groups)
    ]
    return every[0].long(), [text.long() for text in every[1:]]


def train(
    title: str,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    text: torch.Tensor,
    steps: int,
    options: argparse.Namespace,
) -> None:
    """Make steps on pieces of a text drawn at random; nothing in it knows of ranks."""
    draw = torch.Generator().manual_seed(1 + options.seed + bf.rank())
    total = 0.0
    for step in range(1, steps + 1):
        start = torch.randint(len(text) - model.context, (options.batch, 1), generator=draw)
        loss = model.loss(text[start + torch.arange(model.context + 1)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        if step % (every := max(1, steps // 5)) == 0:
            if bf.rank() == 0:
                print(f"{title:9} step {step:4}: loss of rank 0 {total / every:.3f}", flush=True)
            total = 0.0


@torch.no_grad()
def judge(model: GPT, texts: list[torch.Tensor]) -> list[float]:
    """Losses of the texts."""
    long = model.context + 1
    return [model.loss(text[: len(text) // long * long].view(-1, long)).item() for text in texts]


def main() -> None:
    """Train the base, then adapters of each rank alone, then averaged ones; compare."""
    options = parse_options()
    bf.init()
    base, groups = read_texts()
    mine = groups[bf.rank() % len(groups)]
    mine, ends = mine[: len(mine) * 9 // 10], [text[len(text) * 9 // 10 :] for text in groups]
    torch.manual_seed(options.seed)
    model = GPT(options.context, options.width)
    if options.base is not None and options.base.is_file():
        model.load_state_dict(torch.load(options.base, weights_only=True))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        optimizer = bf.DistributedOptimizer(optimizer, model, algorithm="gradient_allreduce")
        train("base", model, optimizer, base, options.base_steps, options)
        optimizer.close()
        if options.base is not None and bf.rank() == 0:
            torch.save(model.state_dict(), options.base)
    size = sum(parameter.numel() for parameter in model.parameters())
    table = {"base": judge(model, ends)}

    adapters = add_adapters(model, options.rank, options.alpha)
    start = [adapter.detach().clone() for adapter in adapters]
    alone = torch.optim.AdamW(adapters, lr=options.lr)
    train("alone", model, alone, mine, options.steps, options)
    for rank, losses in enumerate(bf.allgather_object(judge(model, ends))):
        table[f"rank {rank} alone"] = losses
    with bf.average_model(model):
        table["averaged in the end"] = judge(model, ends)

    torch.nn.utils.vector_to_parameters(torch.cat([x.flatten() for x in start]), adapters)
    kind = bf.QAdamOptimizer if options.method == "qadam" else torch.optim.AdamW
    optimizer = bf.DistributedOptimizer(  # of the adapters: nothing else is averaged, or sent
        kind(adapters, lr=options.lr), model, algorithm=options.method, topology=options.topology
    )
    train("averaged", model, optimizer, mine, options.steps, options)
    optimizer.conclude()  # neighbours by one-sided methods need not look for this rank any more
    distance = bf.consensus_distance(adapters)
    with bf.average_model(model):
        table["averaged in each step"] = judge(model, ends)
    if bf.rank() == 0:
        sent, thin = optimizer.bytes_sent / 1e6, sum(adapter.numel() for adapter in adapters)
        print(f"\n{'loss on the end of':22}" + "".join(f"{name:>12}" for name in (*GROUPS, "mean")))
        for name, losses in table.items():
            cells = "".join(f"{loss:12.3f}" for loss in (*losses, sum(losses) / len(losses)))
            print(f"{name:22}{cells}")
        print(
            f"\nThe ranks' adapters are {distance:.2e} from their average. With {thin:,} of "
            f"{size + thin:,} parameters a rank\nhas sent {sent:.1f} MB by {options.method}; "
            f"with all of the base's it would be {sent * size / thin:.1f} MB."
        )
        if options.out:
            save_picture(table, options)


def save_picture(table: dict[str, list[float]], options: argparse.Namespace) -> None:
    """What each model has gained over the base, on each group's end: blue is better."""
    from matplotlib.figure import Figure

    rows = [name for name in table if name != "base"]
    gained = torch.tensor([table[name] for name in rows]) - torch.tensor(table["base"])
    most = float(gained.abs().max())
    figure = Figure(figsize=(7, 0.8 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(gained, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
    for row, losses in enumerate(gained.tolist()):
        for column, loss in enumerate(losses):
            color = "white" if abs(loss) > 0.6 * most else "black"
            axes.text(column, row, f"{loss:+.2f}", ha="center", va="center", color=color)
    axes.set_xticks(range(len(GROUPS)), GROUPS)
    axes.set_yticks(range(len(rows)), rows)
    figure.colorbar(shown, label="loss less the base's")
    axes.set_title(f"loss on the end of each group; averages by {options.method}", fontsize=9)
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
    add("--base", type=Path, metavar="FILE", help="the base: read if it is there, else written")
    add("--base-steps", type=int, default=300, help="by which the base is trained")
    add("--steps", type=int, default=200, help="by which adapters are trained, each time")
    add("--rank", type=int, default=4, help="of adapters")
    add("--alpha", type=float, default=8.0, help="by which adapters count, beside their rank")
    add("--width", type=int, default=64, help="of the transformer; 4 heads share it")
    add("--context", type=int, default=64, help="bytes that the transformer sees")
    add("--batch", type=int, default=16, help="pieces of text in a step, on each rank")
    add("--lr", type=float, default=3e-3, help="step size of AdamW")
    add("--seed", type=int, default=0, help="of weights and pieces of text")
    add("--out", type=Path, help="picture: png, svg or pdf")
    add("--smoke", action="store_true", help="a few steps, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.base_steps, options.steps = 5, 5
    for name in ("rank", "context", "batch", "steps", "base_steps"):
        if (got := getattr(options, name)) < 1:
            parser.error(f"argument --{name.replace('_', '-')}: expected at least 1, got {got}")
    if options.width % 4:
        parser.error(f"argument --width: expected a multiple of 4, got {options.width}")
    return options


if __name__ == "__main__":
    main()
