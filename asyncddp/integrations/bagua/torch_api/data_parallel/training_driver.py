"""Base class of training drivers: each trains a wrapped model in one way, until it ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any


class TrainingDriver(ABC):
    """Driver of a wrapped model's training (base class)."""

    @property
    @abstractmethod
    def buckets(self) -> list[Any]:
        """The buckets, in the order in which they are sent."""

    def before_forward(self, inputs: Any) -> None:  # noqa: B027 - optional hook
        """Prepare for a forward pass in training mode."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Let gradients accumulate in a ``with`` block, in which nothing is communicated."""

    def abort(self) -> None:  # noqa: B027 - optional hook
        """End averaging that goes on by the clock; collective."""

    def resume(self) -> None:  # noqa: B027 - optional hook
        """Let it go on."""

    @abstractmethod
    def end(self) -> None:
        """End what is under way, and leave the model and its optimizers as they were."""
