"""A training step on a GPU: one-peer averaging of a ResNet-50 beside the step without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncddp import topology
from benchmarks.gpu.verb_tables import GpuTableSetup, own_gpus
from benchmarks.tables import Call, Rival, Target, TimingTable
from benchmarks.training_models import Workload
from benchmarks.training_step import (
    ATC,
    ATC_IN_BACKWARD,
    AWC,
    LOCAL,
    TrainingSetup,
    make_training,
    ours,
)

__all__ = ["resnet50", "step_table"]

_DEPTHS = (3, 4, 6, 3)


class _Bottleneck(nn.Module):
    """Residual bottleneck block of three convolutions."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.inside = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            straight = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.around = nn.Sequential(straight, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inside(x) + self.around(x))


def _residual(channels: int, classes: int) -> nn.Module:
    blocks: list[nn.Module] = []
    inputs = channels
    for stage, depth in enumerate(_DEPTHS):
        for number in range(depth):
            stride = 2 if number == 0 and stage > 0 else 1
            blocks.append(_Bottleneck(inputs, channels << stage, stride))
            inputs = 4 * channels << stage
    return nn.Sequential(
        nn.Conv2d(3, channels, 7, 2, padding=3, bias=False),
        *(nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
        *blocks,
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)),
    )


def resnet50(
    samples: int = 64, *, channels: int = 64, side: int = 224, classes: int = 1000
) -> Workload:
    """A ResNet-50 (He et al., 2016): 25.6 million parameters."""

    def batch(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 3, side, side), torch.randint(classes, (count,))

    title = f"a ResNet-50 of {channels} channels on 3 x {side} x {side}, batch of {samples}"
    return Workload("resnet50", title, partial(_residual, channels, classes), batch, samples)


def step_table(setup: GpuTableSetup, transport: str, workload: Workload) -> TimingTable:
    """A step of every method with one peer, each on a model of its own."""
    world, device = setup.world, setup.device
    graph = topology.one_peer_exponential(world.size)
    awc, atc = "adapt_with_combine", "adapt_then_combine"
    methods: dict[str, Callable[[TrainingSetup], None]] = {
        LOCAL: lambda made: None,
        ATC: partial(ours, algorithm=atc, graph=graph),
        ATC_IN_BACKWARD: partial(ours, algorithm=atc, graph=graph, update_in_backward=True),
        AWC: partial(ours, algorithm=awc, graph=graph),
        "gradient_allreduce": partial(ours, algorithm="gradient_allreduce"),
    }

    def prepare(method: Callable[[TrainingSetup], None], nbytes: int) -> Call:
        with torch.device(device.place):
            made = make_training(world, workload)
        method(made)
        return setup.ended(made.step)

    return TimingTable(
        f"step_{transport}_{world.size}",
        f"a step of {workload.title}, by {transport}, {world.size} ranks",
        [workload.nbytes],
        [Rival(name, partial(prepare, method)) for name, method in methods.items()],
        size_is="model",
        targets=[]
        if not own_gpus(world)
        else [
            Target(
                (ATC, ATC_IN_BACKWARD),
                1.02,
                LOCAL,
                words="one-peer ATC: ≤ 2% over the local step",
                told=lambda ratio: f"{ratio - 1:.0%}",
            )
        ],
        lead=1,
        samples=workload.samples * world.size,
        note=f"{workload.nbytes / 4e6:.3g} million parameters in float32, SGD with momentum.",
    )
