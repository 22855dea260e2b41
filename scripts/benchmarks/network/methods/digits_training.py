"""A million parameters that learn scikit-learn's digits, with simulated accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.network.simulated_accelerator import SimulatedAccelerator

BATCH = 16
"""Images of a rank in a step."""

_WIDTH, _DEPTH, _CLASSES, _PIXELS = 512, 5, 10, 64
_PARAMETERS = (
    (_PIXELS + 1) * _WIDTH + (_DEPTH - 1) * (_WIDTH + 1) * _WIDTH + (_WIDTH + 1) * _CLASSES
)
NBYTES = 4 * _PARAMETERS
"""Bytes of the model."""

BUCKET_MB = 1.1
"""MiB of a bucket: one for each of the square layers."""

_TEST = 450


@dataclass(frozen=True)
class _Digits:
    """Images of 64 numbers in 0..1, and labels."""

    inputs: torch.Tensor
    labels: torch.Tensor


def read_digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Read 1,797 images, centred and scaled, and labels, in an order that is always the same."""
    from sklearn.datasets import load_digits  # loaded by the rank that reads only

    inputs, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    centred = (inputs - inputs.mean(axis=0)) / inputs.std()
    return centred[order].astype(np.float32), labels[order].astype(np.int64)


class DigitsTraining:
    """Model with a rank's share of the images; makes forward and backward passes.

    Equal on all ranks at first, whatever trained before.

    Args:
        digits: What :func:`read_digits` gave.
        rank, size: Of this rank: it has every ``size``-th of the training images.
        seconds: Of the simulated accelerator in a step, evenly over the layers.
        seed: Of the parameters, and with the rank of the batches.

    Attributes:
        model: The model.
    """

    def __init__(
        self,
        digits: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
        rank: int,
        size: int,
        seconds: float,
        seed: int = 0,
    ) -> None:
        inputs, labels = map(torch.from_numpy, digits)
        mine = slice(_TEST + rank, None, size)
        self._train = _Digits(inputs[mine], labels[mine])
        self._test = _Digits(inputs[:_TEST], labels[:_TEST])
        self._batches = torch.Generator().manual_seed(1000 * seed + rank)
        start = torch.Generator().manual_seed(seed)
        widths = (_PIXELS, *[_WIDTH] * _DEPTH, _CLASSES)
        parts: list[torch.nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layer = torch.nn.Linear(fan_in, fan_out)
            torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=start)
            torch.nn.init.zeros_(layer.bias)
            accelerator = SimulatedAccelerator(seconds / 3 / (_DEPTH + 1))
            parts += [layer, accelerator, torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*parts[:-1])

    def slow_down(self, times: float) -> None:
        """Let the accelerator take so many times as long from now on."""
        for module in self.model.modules():
            if isinstance(module, SimulatedAccelerator):
                module.seconds *= times

    def backward(self, model: torch.nn.Module) -> None:
        """Make a pass on the next batch, through the model or what wraps it."""
        images = torch.randint(len(self._train.labels), (BATCH,), generator=self._batches)
        inputs, labels = self._train.inputs[images], self._train.labels[images]
        F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def accuracy(self, parameters: torch.Tensor) -> float:
        """Share of the test images that a model with these parameters names rightly.

        Args:
            parameters: All of them in one vector; they stay in the model.
        """
        torch.nn.utils.vector_to_parameters(parameters, self.model.parameters())
        self.slow_down(0.0)
        right = self.model(self._test.inputs).argmax(dim=1) == self._test.labels
        return float(right.float().mean())
