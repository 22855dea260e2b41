"""Models for benchmarks of training steps, each with a batch that keeps one core busy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Workload", "convnet", "narrow_mlp", "transformer"]


@dataclass(frozen=True)
class Workload:
    """Model with its loss and training data.

    Attributes:
        key: Short name.
        title: What it is.
        build: Makes the model; the random state has been set.
        batch: Makes inputs and targets of so many samples.
        samples: In a batch of each rank.
    """

    key: str
    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    samples: int

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        with torch.device("meta"):
            return sum(p.numel() * p.element_size() for p in self.build().parameters())


def _labelled(*shape: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda samples: (torch.randn(samples, *shape), torch.randint(classes, (samples,)))


# many narrow layers


def _narrow(layers: int, width: int) -> nn.Module:
    """Create linear layers with He's initialisation, which many layers need."""
    modules: list[nn.Module] = []
    for _ in range(layers):
        linear = nn.Linear(width, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def narrow_mlp(samples: int = 32, layers: int = 100, width: int = 64) -> Workload:
    """An MLP of 100 layers of width 64: 200 small tensors."""
    title = f"an MLP of {layers} layers of width {width}, batch of {samples}"
    batch = _labelled(width, classes=width)
    return Workload("mlp", title, partial(_narrow, layers, width), batch, samples)


# a residual convnet


class _ResidualBlock(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm_one = nn.BatchNorm2d(outputs)
        self.two = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_two = nn.BatchNorm2d(outputs)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            straight = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.around = nn.Sequential(straight, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_two(self.two(F.relu(self.norm_one(self.one(x)))))
        return F.relu(y + self.around(x))


def _residual(channels: int) -> nn.Module:
    blocks: list[nn.Module] = []
    inputs = channels
    for outputs, stride in ((1, 1), (2, 2), (4, 2), (8, 2)):
        blocks.append(_ResidualBlock(inputs, outputs * channels, stride))
        inputs = outputs * channels
        blocks.append(_ResidualBlock(inputs, inputs, 1))
    return nn.Sequential(
        nn.Conv2d(3, channels, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(inputs, 10),
    )


def convnet(samples: int = 16, channels: int = 64) -> Workload:
    """A ResNet-18 (He et al., 2016) for ten classes: 11 million parameters."""
    title = f"a ResNet-18 of {channels} channels on 3 x 32 x 32, batch of {samples}"
    batch = _labelled(3, 32, 32, classes=10)
    return Workload("convnet", title, partial(_residual, channels), batch, samples)


# a transformer

_TOKENS, _CONTEXT, _HEAD = 256, 32, 64


class _Transformer(nn.Module):
    """Transformer that predicts the next byte from the previous ones."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_TOKENS, width)
        self.places = nn.Parameter(torch.zeros(_CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width,
            width // _HEAD,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, _TOKENS)

    def forward(self, text: Tensor) -> Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.layers(self.tokens(text) + self.places, mask=later, is_causal=True)
        scores: Tensor = self.head(hidden)
        return scores.flatten(0, 1)


def _text(samples: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(_TOKENS, (samples, _CONTEXT + 1))
    return text[:, :-1], text[:, 1:].flatten()


def transformer(samples: int = 4, layers: int = 6, width: int = 384) -> Workload:
    """A transformer (Vaswani et al., 2017; causal, norm first): 11 million parameters."""
    sequences = f"batch of {samples} x {_CONTEXT} tokens"
    title = f"a transformer of {layers} layers of width {width}, {sequences}"
    return Workload("transformer", title, partial(_Transformer, layers, width), _text, samples)
