"""Program on every rank: ``examples/gpt.py`` with its own options, and layers that take time."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch

import asyncddp as bf
from benchmarks.network.simulated_accelerator import SimulatedAccelerator

__all__ = ["load_example", "main"]

_EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt.py"
_PASSES = 3  # a backward pass takes twice as long as a forward pass


def load_example() -> Any:
    """Import the example, which is no package."""
    spec = importlib.util.spec_from_file_location("gpt", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def _slowed(gpt: type[torch.nn.Module], seconds: float) -> type[torch.nn.Module]:
    """Return the model with a sleep after each block, ``seconds`` a step in all."""

    class SlowedGPT(gpt):  # type: ignore[misc, valid-type]
        def __init__(self, *shape: int) -> None:
            super().__init__(*shape)
            share = seconds / _PASSES / len(self.blocks)
            for place in range(len(self.blocks), 0, -1):
                self.blocks.insert(place, SimulatedAccelerator(share))

    return SlowedGPT


def main() -> None:
    """Train as the words say, and write what rank 0 measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerator", type=float, default=0.0)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--interface")
    parser.add_argument("--out", type=Path)
    own, words = parser.parse_known_args()
    if own.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = own.interface
    torch.set_num_threads(1)
    example = load_example()
    options = example.parse_options(words)
    bf.init()
    if own.accelerator:
        last = bf.rank() == bf.size() - 1
        seconds = own.accelerator * (own.slower if last else 1)
        example.GPT = _slowed(example.GPT, seconds)
    records = example.train(options)
    if bf.rank() == 0:
        own.out.write_text(json.dumps({"records": records}), encoding="utf-8")


if __name__ == "__main__":
    main()
