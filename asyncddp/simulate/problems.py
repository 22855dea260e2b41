"""Problems for comparing algorithms: some with known solutions, and a small one on real data."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from asyncddp.data import partition
from asyncddp.errors import ArgumentError
from asyncddp.install_commands import needed_package
from asyncddp.simulate.problem import Problem
from asyncddp.tensors.allocation import make_tensor


def least_squares(ranks: int, *, seed: int = 0) -> Problem:
    r"""Make the least squares problem LS(n), with different data on every rank.

    .. math:: f_i(x) = \frac{1}{2 \cdot 50} \lVert A_i x - b_i \rVert^2, \qquad
              b_i = A_i (x_s + \xi_i) + 0.1\, \epsilon_i

    with :math:`x \in \mathbb R^{10}`, 50 rows a rank, and all else drawn from the standard normal
    distribution. The optimum is known, all is in float64, and batches are whole.

    Args:
        ranks: Number of ranks, n.
        seed: Seed of the random numbers.

    Returns:
        The problem, which starts at 0.

    Example:
        >>> from asyncddp import simulate
        >>> problem = simulate.least_squares(8)
        >>> print(f"{problem.optimum.norm():.10f}")
        3.4515184231
    """
    random = np.random.default_rng(seed)
    center = random.standard_normal(10)
    rows = random.standard_normal((ranks, 50, 10))
    own = center + random.standard_normal((ranks, 10))
    targets = np.einsum("nij,nj->ni", rows, own) + 0.1 * random.standard_normal((ranks, 50))
    normal = np.einsum("nij,nik->jk", rows, rows), np.einsum("nij,ni->j", rows, targets)
    model = torch.nn.Linear(10, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    a, b = make_tensor(rows, torch.float64), make_tensor(targets, torch.float64)
    return Problem(
        model,
        _half_mean_square,
        list(zip(a, b, strict=True)),
        optimum=make_tensor(np.linalg.solve(*normal), torch.float64),
        name=f"least squares, {ranks} ranks",
    )


def _half_mean_square(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] - targets).square().mean() / 2


def digits(
    ranks: int,
    *,
    alpha: float | None = None,
    labels_per_rank: int | None = None,
    batch_size: int = 16,
    hidden: int = 64,
    seed: int = 0,
) -> Problem:
    """Make the classification of scikit-learn's 1,797 handwritten digits, divided among ranks.

    The model is a network of one hidden layer. A quarter of the images are set aside, by which the
    average model is judged: the score is its accuracy.

    Args:
        ranks: Number of ranks, at most 1,348.
        alpha: How the ranks' digits differ: Dirichlet(alpha), see
            :func:`asyncddp.data.partition.dirichlet`; None shares images out evenly.
        labels_per_rank: Instead, about so many of the ten digits a rank, 1 to 10, equally many
            images of each, see :func:`asyncddp.data.partition.shards`.
        batch_size: Images of a batch.
        hidden: Units of the hidden layer.
        seed: Seed of the model and of the division of images.

    Returns:
        The problem.

    Raises:
        ArgumentError: There are more ranks, or labels of them, than images; ``alpha`` is not above
            0; ``labels_per_rank`` is none of 1 to 10; or both are given.
        EnvironmentProblem: scikit-learn is not installed.

    Example:
        >>> from asyncddp import simulate
        >>> problem = simulate.digits(64, alpha=0.1)  # doctest: +SKIP
    """
    with needed_package("simulate.digits needs scikit-learn", "examples"):
        from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, rest = order[: len(order) // 4], order[len(order) // 4 :]
    if not 1 <= ranks <= len(rest):
        raise ArgumentError(
            f"digits: argument ranks: expected 1 to {len(rest)}, of which each has an image, got "
            f"{ranks}; least squares takes any number"
        )
    parts, shared_out = _shared_out(labels[rest], ranks, alpha, labels_per_rank, seed)
    inputs = make_tensor(images / 16, torch.float32)
    targets = make_tensor(labels, torch.int64)
    rows = [make_tensor(rest[part], torch.int64) for part in parts]
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10)
    )
    torch.random.set_rng_state(generator)
    judged = inputs[test.tolist()], targets[test.tolist()]

    def accuracy(average: torch.nn.Module) -> float:
        right: torch.Tensor = average(judged[0]).argmax(dim=1) == judged[1]
        return float(right.float().mean())

    return Problem(
        model,
        torch.nn.functional.cross_entropy,
        [(inputs[row], targets[row]) for row in rows],
        batch_size=batch_size,
        evaluate=accuracy,
        name=f"digits, {ranks} ranks{shared_out}",
    )


def _shared_out(
    labels: npt.NDArray[np.int64],
    ranks: int,
    alpha: float | None,
    labels_per_rank: int | None,
    seed: int,
) -> tuple[list[partition.Indices], str]:
    """Return the samples of each rank, and a description of the partition for a title."""
    if alpha is not None and labels_per_rank is not None:
        raise ArgumentError(
            f"digits: arguments alpha and labels_per_rank: expected one way to share images out, "
            f"got {alpha:g} and {labels_per_rank}; leave one of them out"
        )
    if labels_per_rank is not None:
        most = min(10, len(labels) // ranks)
        if not 1 <= labels_per_rank <= most:
            raise ArgumentError(
                f"digits: argument labels_per_rank: expected 1 to {most} with {ranks} ranks, which "
                f"share ten labels and {len(labels)} images, got {labels_per_rank}"
            )
        dealt = partition.shards(labels, ranks, labels_per_rank, seed=seed)
        return dealt, f", {labels_per_rank} {'label' if labels_per_rank == 1 else 'labels'} each"
    if alpha is not None:
        drawn = partition.dirichlet(labels, ranks, alpha, equal_sizes=True, seed=seed)
        return drawn, f", Dirichlet({alpha:g})"
    return partition.uniform(len(labels), ranks, seed=seed), ""
