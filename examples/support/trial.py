"""What a training leaves: models of all ranks over time, and how good their average was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import asyncddp as bf
from support.data import Digits

__all__ = ["Mark", "Trial", "accuracy", "curve_of"]


@dataclass(frozen=True)
class Mark:
    """One rank's model after some steps, and seconds after the start."""

    step: int
    seconds: float
    parameters: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: torch.nn.Module, step: int, seconds: float) -> Mark:
        """Copy the parameters as they are now."""
        return cls(step, seconds, torch.nn.utils.parameters_to_vector(model.parameters()).cpu())

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.step / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Trial:
    """One training.

    Attributes:
        method: What averaged.
        ends: The last mark of each rank; the last rank is the slow one.
        curve: Seconds, and the average model's accuracy on the test images in per cent.
    """

    method: str
    ends: list[Mark]
    curve: list[tuple[float, float]]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return max(mark.seconds for mark in self.ends)

    @property
    def rates(self) -> tuple[float, float]:
        """Steps per second: of the ranks but the slow one on average, and of the slow one."""
        *fast, slow = (mark.rate for mark in self.ends)
        return sum(fast) / len(fast), slow

    @property
    def accuracy(self) -> float:
        """Of the average model in the end."""
        return self.curve[-1][1]

    def reached(self, target: float) -> float | None:
        """Seconds until the average model first had this accuracy; None where it never had."""
        return next((seconds for seconds, height in self.curve if height >= target), None)


@torch.no_grad()
def accuracy(model: torch.nn.Module, digits: Digits) -> float:
    """Per cent of the test images, all ten digits, that the model names rightly."""
    right = model(digits.test_inputs).argmax(dim=1) == digits.test_labels
    return 100 * float(right.float().mean())


def curve_of(
    marks: Sequence[Mark], every: float, model: torch.nn.Module, digits: Digits
) -> list[tuple[float, float]]:
    """The accuracy of the average of all ranks' models over time; all ranks call this together.

    At each moment a rank's model is the last that it had put aside. ``model`` is overwritten.
    """
    last = max(bf.allgather_object(marks[-1].seconds))
    moments = [every * number for number in range(int(last / every) + 1)] + [last]
    latest = [[mark for mark in marks if mark.seconds <= moment] for moment in moments]
    models = torch.stack([(before or marks)[-1 if before else 0].parameters for before in latest])
    curve = []
    for moment, average in zip(moments, bf.allreduce(models), strict=True):
        torch.nn.utils.vector_to_parameters(average.to(digits.inputs.device), model.parameters())
        curve.append((moment, accuracy(model, digits)))
    return curve
