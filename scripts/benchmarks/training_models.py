"""Models for benchmarks of training steps, each with a batch that keeps one core busy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SGD = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)


@dataclass(frozen=True)
class Workload:
    """Model with its loss and training data.

    Attributes:
        key: Short name.
        title: What it is.
        build: Makes the model; the random state has been set.
        batch: Makes inputs and targets of so many samples.
        samples: In a batch of each rank.
        loss: Of the model's output and the targets.
        optimizer: Makes the plain optimizer of some parameters.
    """

    key: str
    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    samples: int
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    optimizer: Callable[..., torch.optim.Optimizer] = _SGD

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


# residual convnets


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


class _ResidualBlock(nn.Module):
    """Residual block of two convolutions, or as a bottleneck of three."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        parts = [_convolution(inputs, width, 3, stride), _convolution(width, width, 3)]
        if bottleneck:
            parts = [
                _convolution(inputs, width, 1),
                _convolution(width, width, 3, stride),
                _convolution(width, outputs, 1),
            ]
        inside = [layer for part in parts for layer in (*part, nn.ReLU())]
        self.inside = nn.Sequential(*inside[:-1])
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inside(x) + self.around(x))


def _residual(channels: int, classes: int, depths: Sequence[int], *, bottleneck: bool) -> nn.Module:
    blocks: list[nn.Module] = []
    inputs = channels
    for stage, depth in enumerate(depths):
        width = channels << stage
        for number in range(depth):
            stride = 2 if number == 0 and stage > 0 else 1
            blocks.append(_ResidualBlock(inputs, width, stride, bottleneck=bottleneck))
            inputs = 4 * width if bottleneck else width
    return nn.Sequential(
        *_convolution(3, channels, 7, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(inputs, classes),
    )


def convnet(samples: int = 16, channels: int = 64) -> Workload:
    """A ResNet-18 (He et al., 2016) for ten classes: 11 million parameters."""
    title = f"a ResNet-18 of {channels} channels on 3 x 32 x 32, batch of {samples}"
    build = partial(_residual, channels, 10, (2, 2, 2, 2), bottleneck=False)
    return Workload("convnet", title, build, _labelled(3, 32, 32, classes=10), samples)


def resnet50(
    samples: int = 64, *, channels: int = 64, side: int = 224, classes: int = 1000
) -> Workload:
    """A ResNet-50 (He et al., 2016): 25.6 million parameters."""
    title = f"a ResNet-50 of {channels} channels on 3 x {side} x {side}, batch of {samples}"
    build = partial(_residual, channels, classes, (3, 4, 6, 3), bottleneck=True)
    return Workload("resnet50", title, build, _labelled(3, side, side, classes=classes), samples)


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


# linear layers without bias


def _square_mean(output: Tensor, targets: Tensor) -> Tensor:
    return output.square().mean()


def _squares(layers: int, width: int, between: Callable[[], list[nn.Module]]) -> nn.Module:
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(width, width, bias=False), *between()]
    return nn.Sequential(*modules)


def squares(
    layers: int,
    width: int,
    optimizer: Callable[..., torch.optim.Optimizer],
    between: Callable[[], list[nn.Module]] = list,
) -> Workload:
    """Square linear layers, batch of 4: of known bytes, and little to compute.

    Args:
        layers: How many.
        width: Inputs and outputs of each.
        optimizer: Makes the plain optimizer.
        between: Makes what stands behind each layer.
    """

    def batch(samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, width), torch.empty(0)

    title = f"{layers} square layers of width {width}"
    build = partial(_squares, layers, width, between)
    return Workload("squares", title, build, batch, 4, _square_mean, optimizer)


def benched_models(*, quick: bool) -> list[Workload]:
    """Return the three models on which steps are measured."""
    if quick:
        return [narrow_mlp(4, layers=20), convnet(2, channels=8), transformer(1, 1, 64)]
    return [narrow_mlp(), convnet(), transformer()]
