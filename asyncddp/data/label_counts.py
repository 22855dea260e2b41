"""Labels of the parts of a partition: counted, and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asyncddp.install_commands import needed_package

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMED = 20  # labels up to which each has its name in the picture


def label_counts(
    labels: npt.ArrayLike, partition: Sequence[npt.ArrayLike]
) -> npt.NDArray[np.int64]:
    """Count the samples of each label in each part.

    Args:
        labels: Label of each sample, ``(N,)``.
        partition: The indices of each part.

    Returns:
        Counts, ``(parts, number of labels)``, int64, the labels in ascending order.

    Example:
        >>> from asyncddp.data import partition
        >>> partition.label_counts(["b", "a", "b"], [[0, 1], [2]]).tolist()
        [[1, 1], [0, 1]]
    """
    names, codes = np.unique(np.asarray(labels), return_inverse=True)
    counts = [
        np.bincount(codes[np.asarray(part, np.int64)], None, len(names)) for part in partition
    ]
    return np.stack(counts).astype(np.int64)


def draw(labels: npt.ArrayLike, partition: Sequence[npt.ArrayLike]) -> Figure:
    """Draw how many samples of each label each part has, as one bar a part.

    Args:
        labels: Label of each sample, ``(N,)``.
        partition: The indices of each part.

    Returns:
        A ``matplotlib.figure.Figure``: ``draw(labels, parts).savefig("parts.png")``.

    Raises:
        EnvironmentProblem: matplotlib is not installed.

    Example:
        >>> from asyncddp.data import partition
        >>> figure = partition.draw([0, 1, 0, 1], partition.uniform(4, 2))
        >>> figure.axes[0].get_xlabel()
        'part'
    """
    with needed_package("partition.draw needs matplotlib", "plot"):
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    names, counts = np.unique(np.asarray(labels)), label_counts(labels, partition)
    places = np.arange(len(counts))
    figure = Figure((max(5.0, min(14.0, 1.8 + 0.35 * len(counts))), 3.2), layout="constrained")
    axes = figure.subplots()
    colors: Any = colormaps["tab10" if len(names) <= 10 else "turbo"]
    bottom = np.zeros(len(counts), np.int64)
    for code, name in enumerate(names):
        color = colors(code if len(names) <= 10 else code / (len(names) - 1))
        axes.bar(places, counts[:, code], 0.85, bottom, color=color, label=str(name))
        bottom += counts[:, code]
    axes.set(xlabel="part", ylabel="samples", xlim=(-0.6, len(counts) - 0.4))
    axes.locator_params(axis="x", integer=True)
    if len(names) <= _NAMED:
        figure.legend(title="label", loc="outside right upper", fontsize=8)
    return figure
