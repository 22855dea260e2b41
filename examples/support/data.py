"""Scikit-learn's 1,797 handwritten digits, split by label."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

__all__ = ["SPLITS", "Digits", "read_digits"]

SPLITS = ("images", "digits")


@dataclass(frozen=True)
class Digits:
    """Images to train on, 64 numbers in 0..1 each, and images to test with.

    Attributes:
        inputs, labels: The training images, and which digit each one is.
        test_inputs, test_labels: 450 images of all ten digits, the same on every rank.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    test_inputs: torch.Tensor
    test_labels: torch.Tensor

    def share(self, rank: int, size: int, split: str) -> Digits:
        """One rank's part of the training images.

        With ``images`` every ``size``-th one, of all ten digits; with ``digits`` all images of the
        digits rank, rank + size, … and of no others.
        """
        by = self.labels if split == "digits" else torch.arange(len(self.labels))
        mine = by.to(self.labels.device) % size == rank
        return replace(self, inputs=self.inputs[mine], labels=self.labels[mine])

    def to(self, device: torch.device) -> Digits:
        """The same images on a device."""
        moved = {item.name: getattr(self, item.name).to(device) for item in fields(self)}
        return replace(self, **moved)


def read_digits() -> Digits:
    """Load all images and set a quarter of each digit's aside for the test."""
    from sklearn.datasets import load_digits  # loaded by the rank that reads only
    from sklearn.model_selection import train_test_split

    inputs, labels = load_digits(return_X_y=True)
    split = train_test_split(inputs / 16, labels, test_size=450, stratify=labels, random_state=0)
    train, test = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    train_labels, test_labels = (torch.tensor(part, dtype=torch.int64) for part in split[2:])
    return Digits(train, train_labels, test, test_labels)
