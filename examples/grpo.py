"""Reinforcement learning by GRPO on ranks that keep nobody waiting: a transformer learns to sort.

    asyncddp run -np 4 examples/grpo.py
    torchrun --nproc-per-node 4 examples/grpo.py
    python examples/grpo.py

A small policy reads digits, such as ``3141>``, and is to write them in order, ``1134.``. A rule
judges it: the reward is the share of tokens that are right before the first mistake. In each
episode a rank draws ``--prompts`` lists of digits and samples ``--group`` completions of each. The
advantage of a completion is its reward beside those of its group:

    A = (R - mean(R of the group)) / std(R of the group)

Then the rank makes ``--updates`` steps along the gradient of the clipped loss, over all tokens,
with p the policy, p_old the one that has sampled, q the one at the start, and r = p / p_old:

    loss = -min(r A, clip(r, 1 - eps, 1 + eps) A) + kl (q / p - log(q / p) - 1)

Episodes differ in length: rank 0 has the shortest lists, the last rank lists of up to ``--longest``
digits. By ``win_put``, the default, each rank averages its model with what its neighbours have
published last, so a rank in a long episode keeps nobody waiting. By ``adapt_then_combine`` they
wait for each other: compare how many episodes the ranks make. All end by the clock.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS

SEPARATOR, END, TOKENS = 10, 11, 12  # after the ten digits
SHORTEST = 2  # digits of a list


class Policy(torch.nn.Module):
    """A transformer, which gives the logits of the token after each token."""

    def __init__(self, context: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(TOKENS, width)
        self.place = torch.nn.Embedding(context, width)
        layer = torch.nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, TOKENS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read tokens, (batch, time), each of which sees the earlier ones."""
        length = tokens.shape[1]
        later = torch.full((length, length), float("-inf")).triu(diagonal=1)
        x = self.token(tokens) + self.place.weight[:length]
        return self.head(self.layers(x, later, is_causal=True))

    @torch.no_grad()
    def complete(self, prompts: torch.Tensor, greedy: bool = False) -> torch.Tensor:
        """Write after each prompt until END, or as many tokens as a right answer has."""
        tokens, length = prompts, prompts.shape[1]
        while tokens.shape[1] < 2 * length and not (tokens == END).any(dim=1).all():
            odds = self(tokens)[:, -1].softmax(dim=1)
            token = odds.argmax(1, keepdim=True) if greedy else torch.multinomial(odds, 1)
            over = tokens[:, -1:] == END
            tokens = torch.cat([tokens, token.masked_fill(over, END)], dim=1)
        return tokens[:, length:]

    def log_probabilities(self, prompts: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        """Of each token that was written."""
        logits = self(torch.cat([prompts, written[:, :-1]], dim=1))[:, prompts.shape[1] - 1 :]
        return logits.log_softmax(dim=2).gather(2, written[:, :, None]).squeeze(2)


def draw_prompts(
    count: int, shortest: int, longest: int, generator: torch.Generator
) -> torch.Tensor:
    """Lists of digits, all of one length that is drawn as well."""
    length = int(torch.randint(shortest, longest + 1, (), generator=generator))
    return F.pad(torch.randint(10, (count, length), generator=generator), (0, 1), value=SEPARATOR)


def rewards(prompts: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """Share of tokens that are right before the first mistake, for each completion."""
    answers = F.pad(prompts[:, :-1].sort(dim=1).values, (0, 1), value=END)
    right = written == answers[:, : written.shape[1]]
    return right.cumprod(dim=1).sum(dim=1) / answers.shape[1]


def loss_of_tokens(
    new: torch.Tensor,
    old: torch.Tensor,
    first: torch.Tensor,
    advantage: torch.Tensor,
    options: argparse.Namespace,
) -> torch.Tensor:
    """The loss above, of logarithms of p, p_old and q."""
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
    distance = (first - new).exp() - (first - new) - 1
    return -torch.min(ratio * advantage, clipped * advantage) + options.kl * distance


def train(
    policy: Policy, optimizer: torch.optim.Optimizer, options: argparse.Namespace
) -> tuple[list[tuple[float, float]], float]:
    """Make episodes until the time is over; give when, with which reward, and tokens of one."""
    at_start = Policy(options.context)
    at_start.load_state_dict(policy.state_dict())
    generator = torch.Generator().manual_seed(options.seed + bf.rank())
    longest = SHORTEST + (options.longest - SHORTEST) * (bf.rank() + 1) // bf.size()
    episodes, tokens, told, begun = list[tuple[float, float]](), 0, 0, time.monotonic()
    while (seconds := time.monotonic() - begun) < options.seconds:
        prompts = draw_prompts(options.prompts, SHORTEST, longest, generator)
        prompts = prompts.repeat_interleave(options.group, dim=0)
        written = policy.complete(prompts)
        reward = rewards(prompts, written)
        groups = reward.view(-1, options.group)
        advantage = groups - groups.mean(dim=1, keepdim=True)
        advantage = (advantage / (groups.std(dim=1, keepdim=True) + 1e-4)).view(-1, 1)
        ended = written == END
        counts = ended.cumsum(dim=1) - ended.long() == 0  # all tokens up to the first END
        with torch.no_grad():
            old = policy.log_probabilities(prompts, written)
            first = at_start.log_probabilities(prompts, written) if options.kl else old
        for _ in range(options.updates):
            new = policy.log_probabilities(prompts, written)
            optimizer.zero_grad()
            loss_of_tokens(new, old, first, advantage, options)[counts].mean().backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()  # averages with what the neighbours have published last
        episodes.append((seconds, float(reward.mean())))
        tokens += int(counts.sum())
        if bf.rank() == 0 and seconds >= told * options.seconds / 10:  # its own; sends nothing
            told += 1
            mean = sum(reward for _, reward in episodes[-50:]) / len(episodes[-50:])
            print(f"{seconds:5.1f} s {len(episodes):5} episodes  reward {mean:.2f}", flush=True)
    return episodes, tokens / max(len(episodes), 1)


def judge(policy: Policy, options: argparse.Namespace) -> str:
    """What the likeliest completions of 300 lists of each length are worth."""
    said, generator = [], torch.Generator().manual_seed(12345)
    for length in range(SHORTEST, options.longest + 1):
        prompts = draw_prompts(300, length, length, generator)
        reward = rewards(prompts, policy.complete(prompts, greedy=True))
        right = (reward == 1).float().mean()
        said.append(f"  {length} digits: reward {reward.mean():.2f}, {right:4.0%} in order")
    return "\n".join(said)


def main() -> None:
    """Train, and judge the average of all ranks' policies before and after."""
    options = parse_options()
    bf.init()
    torch.manual_seed(options.seed + bf.rank())  # ranks sample differently, and start alike
    policy = Policy(options.context)
    kind = bf.QAdamOptimizer if options.method == "qadam" else torch.optim.Adam
    optimizer = bf.DistributedOptimizer(
        kind(policy.parameters(), lr=options.lr),
        policy,
        algorithm=options.method,
        topology=options.topology,
    )
    if bf.rank() == 0:
        print(
            f"{bf.size()} ranks train by {options.method}; at the start\n{judge(policy, options)}"
        )
    with bf.join(optimizer):  # a rank whose time is over leaves the averages of the others
        found = train(policy, optimizer, options)
    everywhere, distance = bf.allgather_object(found), bf.consensus_distance(policy)
    with bf.average_model(policy):
        if bf.rank() == 0:
            for rank, (episodes, tokens) in enumerate(everywhere):
                print(f"rank {rank}: {len(episodes)} episodes of {tokens:.0f} tokens")
            print(f"distance from the average policy: {distance:.3f}")
            print(f"the average policy, at the end\n{judge(policy, options)}")
            if options.out:
                save_picture([episodes for episodes, _ in everywhere], options)


def save_picture(everywhere: list[list[tuple[float, float]]], options: argparse.Namespace) -> None:
    """The reward, a mean of up to 50 episodes, over the seconds of each rank."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for rank, episodes in enumerate(everywhere):
        rewards = torch.tensor([reward for _, reward in episodes])
        means = [
            float(rewards[max(0, end - 50) : end].mean()) for end in range(1, len(rewards) + 1)
        ]
        label = f"rank {rank}: {len(episodes)} episodes"
        axes.plot([seconds for seconds, _ in episodes], means, linewidth=1.1, label=label)
    axes.set(xlabel="seconds", ylabel="reward of the own policy")
    axes.set_title(
        f"{bf.size()} ranks by {options.method}; later ranks have longer lists", fontsize=9
    )
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(options.out, dpi=100)


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The text above as it is, and all defaults."""


def parse_options() -> argparse.Namespace:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add, methods = parser.add_argument, sorted(ALGORITHMS)
    says = f"one of {', '.join(methods)}"
    add("--method", choices=methods, default="win_put", metavar="NAME", help=says)
    add("--topology", metavar="NAME", help="graph of ranks, such as ring; None: the method's own")
    add("--seconds", type=float, default=60, help="of training, on each rank")
    add("--longest", type=int, default=5, help="digits of the longest list")
    add("--prompts", type=int, default=16, help="lists of digits in an episode")
    add("--group", type=int, default=8, help="completions of each list")
    add("--updates", type=int, default=2, help="steps of the optimizer in an episode")
    add("--clip", type=float, default=0.2, help="eps: how far from 1 an r is rewarded")
    add("--kl", type=float, default=0.0, help="weight of the distance from the first policy")
    add("--lr", type=float, default=2e-3, help="step size of Adam")
    add("--seed", type=int, default=0, help="of weights, lists and samples")
    add("--out", type=Path, help="picture: png, svg or pdf")
    add("--smoke", action="store_true", help="a second of short lists, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.seconds, options.longest = 1.0, 3
    for name, least in {"longest": SHORTEST, "prompts": 1, "group": 2, "updates": 1}.items():
        if (got := getattr(options, name)) < least:
            parser.error(f"argument --{name}: expected at least {least}, got {got}")
    options.context = 2 * options.longest + 2
    return options


if __name__ == "__main__":
    main()
