"""Work on every rank: ``examples/gpt.py`` with its own options, and layers that take time."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

import asyncddp as bf
from benchmarks.network.simulated_accelerator import SimulatedAccelerator

_EXAMPLES = Path(__file__).parents[3] / "examples"
_PASSES = 3  # a backward pass takes twice as long as a forward pass


def load_example(name: str = "gpt") -> Any:
    """Import an example, which is no package."""
    spec = importlib.util.spec_from_file_location(name, _EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def slowed(gpt: type[torch.nn.Module], seconds: float) -> type[torch.nn.Module]:
    """Return the model with a sleep after each block, ``seconds`` a step in all."""

    class SlowedGPT(gpt):  # type: ignore[misc, valid-type]
        def __init__(self, *shape: int) -> None:
            super().__init__(*shape)
            share = seconds / _PASSES / len(self.blocks)
            for place in range(len(self.blocks), 0, -1):
                self.blocks.insert(place, SimulatedAccelerator(share))

    return SlowedGPT


def train(
    words: list[str], accelerator: float = 0.0, slower: float = 1.0, interface: str | None = None
) -> dict[str, Any]:
    """Train on this run's ranks, and return what rank 0 has recorded.

    Args:
        words: Options of the example.
        accelerator: Seconds of a step in which the processor is free.
        slower: How many times as long it takes the last rank.
        interface: Of gloo, between hosts.
    """
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    example = load_example()
    options = example.parse_options(words)
    bf.init()
    if accelerator:
        last = bf.rank() == bf.size() - 1
        example.GPT = slowed(example.GPT, accelerator * (slower if last else 1))
    return {"records": example.train(options)}
