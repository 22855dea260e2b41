"""Training problems for simulations: a model, its loss, and the data of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from asyncddp.errors import ArgumentError
from asyncddp.tensors.allocation import make_tensor

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Problem:
    """Model, loss and data of n ranks, which minimise the mean loss over all ranks.

    Args:
        model: The model with which every rank starts, or a list of n such modules. It is copied.
        loss: ``loss(output, *targets)`` gives a scalar tensor.
        data: For each rank its tensors ``(inputs, *targets)``, of equal length along dimension 0;
            ranks may have different numbers of samples.
        batch_size: Samples of a rank's batch, drawn without replacement in each epoch; None takes
            all of them in every step, of which each rank must have equally many.
        optimum: The parameters that minimise the mean loss, flat, ``(d,)``, where they are known.
        evaluate: ``evaluate(model)`` judges the average model, such as by its accuracy.
        name: Title of pictures.

    Raises:
        ArgumentError: Data that fit neither each other nor the batch size.

    Example:
        >>> import torch
        >>> from asyncddp import simulate
        >>> data = [(torch.ones(4, 1), torch.full((4, 1), float(rank))) for rank in range(3)]
        >>> problem = simulate.Problem(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, data)
        >>> problem.ranks
        3
    """

    model: torch.nn.Module | Sequence[torch.nn.Module]
    loss: Callable[..., torch.Tensor]
    data: Sequence[Sequence[torch.Tensor]]
    batch_size: int | None = None
    optimum: torch.Tensor | None = None
    evaluate: Callable[[torch.nn.Module], float] | None = None
    name: str = "a problem"

    @property
    def ranks(self) -> int:
        """Number of ranks, n."""
        return len(self.data)

    def __post_init__(self) -> None:
        _check_data(self.data)
        if isinstance(self.model, Sequence) and len(self.model) != self.ranks:
            raise ArgumentError(
                f"Problem: argument model: expected one module, or one for each of the "
                f"{self.ranks} ranks in data, got {len(self.model)}"
            )
        sizes = sorted({len(part[0]) for part in self.data})
        if self.batch_size is None and len(sizes) > 1:
            raise ArgumentError(
                f"Problem: argument batch_size: ranks have from {sizes[0]} to {sizes[-1]} samples, "
                "which cannot be stacked; expected a number, or equally many samples on all ranks, "
                "as asyncddp.data.partition.dirichlet(..., equal_sizes=True) gives them"
            )
        if self.batch_size is not None and not self.batch_size >= 1:
            raise ArgumentError(
                f"Problem: argument batch_size: expected None or at least 1, got {self.batch_size}"
            )


def _check_data(data: Sequence[Sequence[torch.Tensor]]) -> None:
    if not len(data):
        raise ArgumentError("Problem: argument data: expected the tensors of at least one rank")
    for rank, part in enumerate(data):
        lengths = [len(tensor) for tensor in part]
        if not lengths or len(set(lengths)) > 1 or not lengths[0]:
            raise ArgumentError(
                f"Problem: argument data: rank {rank} has tensors of lengths {lengths}; expected "
                "inputs and targets of the same length, at least 1"
            )
        if len(part) != len(data[0]):
            raise ArgumentError(
                f"Problem: argument data: rank {rank} has {len(part)} tensors, but rank 0 has "
                f"{len(data[0])}"
            )


class StackedBatches:
    """Stacked batches of all ranks; batch k of a rank is the same on every request.

    Args:
        problem: Problem with the data and the batch size.
        seed: Seed of the sample orders, which differ by rank and epoch.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self._size, self._seed = problem.batch_size, seed
        self._lengths = [len(part[0]) for part in problem.data]
        self._starts = np.cumsum([0, *self._lengths[:-1]])
        columns = list(zip(*problem.data, strict=True))
        self._whole: Batch = ()
        self._samples: Batch = ()
        if self._size is None:
            self._whole = tuple(torch.stack(list(column)) for column in columns)
        else:
            self._samples = tuple(torch.cat(list(column)) for column in columns)
        self._orders: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    def of(self, ranks: Sequence[int], numbers: Sequence[int]) -> Batch:
        """Stack one batch of each given rank.

        Args:
            ranks: Which ranks.
            numbers: Number of the batch of each, from 0.

        Returns:
            Tensors ``(len(ranks), samples, …)``.
        """
        if self._size is None:
            everyone = len(ranks) == len(self._lengths)
            return self._whole if everyone else tuple(one[list(ranks)] for one in self._whole)
        rows = [self._row(rank, number) for rank, number in zip(ranks, numbers, strict=True)]
        chosen = make_tensor(np.stack(rows), torch.int64, self._samples[0].device)
        return tuple(one[chosen] for one in self._samples)

    def _row(self, rank: int, number: int) -> npt.NDArray[np.int64]:
        """Return the sample indices of a batch, which may span two or more epochs."""
        size, length = self._size or 0, self._lengths[rank]
        places = np.arange(number * size, (number + 1) * size)
        epochs = places // length
        parts = [
            self._order(rank, int(epoch))[places[epochs == epoch] % length]
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)
        ]
        row: npt.NDArray[np.int64] = np.concatenate(parts) + self._starts[rank]
        return row

    def _order(self, rank: int, epoch: int) -> npt.NDArray[np.int64]:
        if (rank, epoch) not in self._orders:
            self._orders.pop((rank, epoch - 2), None)
            generator = np.random.default_rng([self._seed, rank, epoch])
            self._orders[rank, epoch] = generator.permutation(self._lengths[rank])
        return self._orders[rank, epoch]
