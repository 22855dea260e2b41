"""Partitions of a data set among ranks, even or heterogeneous, reproducible by a seed.

Each function returns a list of sorted arrays of indices, one for each part; every sample is in
exactly one of them. ``[(inputs[part], labels[part]) for part in parts]`` are the ranks' data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.errors import ArgumentError
from asyncddp.install_commands import needed_package

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["by_group", "dirichlet", "draw", "label_counts", "shards", "uniform"]

Indices: TypeAlias = npt.NDArray[np.int64]
_NAMED = 20  # labels up to which each has its name in the picture
_DRAWS = 1000  # of proportions, until every part has min_size samples


def uniform(samples: int, parts: int, *, seed: int = 0) -> list[Indices]:
    """Distribute samples at random over equal parts: the homogeneous case.

    Args:
        samples: Number of samples.
        parts: Number of parts; the first ``samples % parts`` have one sample more.
        seed: Of the random order.

    Returns:
        The indices of each part, ascending, int64.

    Raises:
        ArgumentError: There are fewer samples than parts, or no part.

    Example:
        >>> from asyncddp.data import partition
        >>> [part.tolist() for part in partition.uniform(6, 2)]
        [[2, 3, 5], [0, 1, 4]]
    """
    _check_parts("uniform", parts, samples, "samples")
    order = np.random.default_rng(seed).permutation(samples)
    return [np.sort(part) for part in np.array_split(order, parts)]


def dirichlet(
    labels: npt.ArrayLike,
    parts: int,
    alpha: float,
    *,
    equal_sizes: bool = False,
    min_size: int = 1,
    seed: int = 0,
) -> list[Indices]:
    r"""Distribute samples with label proportions per part drawn from a Dirichlet distribution.

    .. math:: p_c \sim \mathrm{Dir}_n(\alpha, \dots, \alpha), \qquad
              \text{part } i \text{ gets the share } p_{c,i} \text{ of the samples of label } c

    With :math:`\alpha \to \infty` all parts have the same labels, with :math:`\alpha \to 0` each
    label is in one part alone. Sizes differ, the more the smaller :math:`\alpha` is. With
    ``equal_sizes`` it is the part that has proportions of labels, :math:`q_i \sim
    \mathrm{Dir}(\alpha n_c / \bar n)` with :math:`n_c` the samples of label c; parts are filled one
    after the other, and where a label is used up the others of the part take its place.

    Args:
        labels: Label of each sample, ``(N,)``, of any dtype.
        parts: Number of parts, n.
        alpha: Concentration :math:`\alpha`; 0.1 is strong, 1 moderate, 10 weak heterogeneity.
        equal_sizes: Whether all parts have N / n samples.
        min_size: Samples that each part has at least; proportions are drawn again until then.
        seed: Of the proportions, and of which samples go where.

    Returns:
        The indices of each part, ascending, int64.

    Raises:
        ArgumentError: ``alpha`` is not above 0, there are fewer samples than parts need, or parts
            stayed too small after 1000 draws.

    Example:
        >>> import numpy as np
        >>> from asyncddp.data import partition
        >>> labels = np.repeat([0, 1], 500)
        >>> even = partition.dirichlet(labels, 2, alpha=1e6)
        >>> partition.label_counts(labels, even).tolist()
        [[250, 250], [250, 250]]
        >>> skewed = partition.dirichlet(labels, 2, alpha=0.1, equal_sizes=True)
        >>> [len(part) for part in skewed]
        [500, 500]

    References:
        Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated
        visual classification", 2019, for equal sizes. Yurochkin et al., "Bayesian nonparametric
        federated learning of neural networks", ICML 2019, for the others.
    """
    found = _label_vector("dirichlet", "labels", labels)
    _check_parts("dirichlet", parts, len(found), "samples")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not alpha > 0:
        raise ArgumentError(f"dirichlet: argument alpha: expected a number above 0, got {alpha!r}")
    if math.isinf(alpha):
        raise ArgumentError(
            "dirichlet: argument alpha: expected a finite number, got inf; uniform() shares "
            "samples out evenly"
        )
    if not 0 <= min_size * parts <= len(found):
        raise ArgumentError(
            f"dirichlet: argument min_size: {parts} parts of at least {min_size} samples need "
            f"{parts * min_size}, got {len(found)}; expected from 0 to {len(found) // parts}"
        )
    rng = np.random.default_rng(seed)
    _, codes = np.unique(found, return_inverse=True)
    pools = [rng.permutation(np.flatnonzero(codes == code)) for code in range(codes.max() + 1)]
    if equal_sizes:
        return _fill_parts(rng, pools, parts, alpha)
    for _ in range(_DRAWS):
        cuts = [_cuts(rng.dirichlet(np.full(parts, alpha)), len(pool)) for pool in pools]
        sizes = sum(np.diff(cut) for cut in cuts)
        if np.min(sizes) >= min_size:
            pieces = [np.split(pool, cut[1:-1]) for pool, cut in zip(pools, cuts, strict=True)]
            return [np.sort(np.concatenate(part)) for part in zip(*pieces, strict=True)]
    raise ArgumentError(
        f"dirichlet: after {_DRAWS} draws a part still had fewer than min_size={min_size} samples "
        f"of {len(found)}, with parts={parts} and alpha={alpha}; expected a larger alpha, fewer "
        "parts, a smaller min_size, or equal_sizes=True"
    )


def _cuts(shares: npt.NDArray[np.float64], samples: int) -> Indices:
    """Return the cut positions that divide samples by the given shares, rounded."""
    ends = np.rint(np.cumsum(shares) * samples).astype(np.int64)
    ends[-1] = samples
    return np.concatenate([[0], ends])


def _fill_parts(
    rng: np.random.Generator, pools: list[Indices], parts: int, alpha: float
) -> list[Indices]:
    """Fill parts of equal size one after another in random order, each by its own proportions."""
    sizes = np.array([len(pool) for pool in pools])
    total, left = int(sizes.sum()), sizes.copy()
    wanted = [total // parts + (part < total % parts) for part in range(parts)]
    found: list[Indices] = [np.empty(0, np.int64)] * parts
    for part in rng.permutation(parts):
        proportions = rng.dirichlet(np.maximum(alpha * len(sizes) * sizes / total, 1e-12))
        taken = np.zeros_like(left)
        while (need := wanted[part] - int(taken.sum())) > 0:
            open_labels = left > taken
            weights = np.where(open_labels, proportions, 0.0)
            if not weights.sum() > 0:  # of the labels that are left it has none
                weights = np.where(open_labels, left - taken, 0).astype(np.float64)
            taken += np.minimum(rng.multinomial(need, weights / weights.sum()), left - taken)
        pieces = [pool[end - n : end] for pool, end, n in zip(pools, left, taken, strict=True)]
        left -= taken
        found[part] = np.sort(np.concatenate(pieces))
    return found


def shards(
    labels: npt.ArrayLike, parts: int, shards_per_part: int = 2, *, seed: int = 0
) -> list[Indices]:
    """Sort samples by label, cut them into equal shards, and give each part ``shards_per_part``.

    A part then has few labels, about ``shards_per_part``.

    Args:
        labels: Label of each sample, ``(N,)``, of any dtype that can be sorted.
        parts: Number of parts.
        shards_per_part: Shards that each part gets.
        seed: Of which shards go where, and of the order of samples of one label.

    Returns:
        The indices of each part, ascending, int64.

    Raises:
        ArgumentError: There are fewer samples than shards.

    Example:
        >>> import numpy as np
        >>> from asyncddp.data import partition
        >>> labels = np.repeat([0, 1, 2, 3], 10)
        >>> partition.label_counts(labels, partition.shards(labels, 2)).tolist()
        [[0, 10, 10, 0], [10, 0, 0, 10]]

    References:
        McMahan et al., "Communication-efficient learning of deep networks from decentralized
        data", AISTATS 2017.
    """
    found = _label_vector("shards", "labels", labels)
    checked_integer("shards: argument shards_per_part", shards_per_part, 1)
    _check_parts("shards", parts, len(found), "samples", shards_per_part)
    rng = np.random.default_rng(seed)
    mixed = rng.permutation(len(found))
    by_label = mixed[np.argsort(found[mixed], kind="stable")]
    cut = np.array_split(by_label, parts * shards_per_part)
    dealt = rng.permutation(len(cut)).reshape(parts, shards_per_part)
    return [np.sort(np.concatenate([cut[shard] for shard in row])) for row in dealt]


def by_group(groups: npt.ArrayLike, parts: int, *, seed: int = 0) -> list[Indices]:
    """Distribute whole groups of samples over parts, such as all samples of a writer or a patient.

    The largest group goes first, each to the part that has the fewest samples.

    Args:
        groups: Group of each sample, ``(N,)``, of any dtype.
        parts: Number of parts.
        seed: Of the order of groups that are equally large.

    Returns:
        The indices of each part, ascending, int64.

    Raises:
        ArgumentError: There are fewer groups than parts.

    Example:
        >>> from asyncddp.data import partition
        >>> writers = ["ann", "bob", "ann", "cy", "ann", "bob"]
        >>> [part.tolist() for part in partition.by_group(writers, 2)]
        [[0, 2, 4], [1, 3, 5]]

    References:
        Caldas et al., "LEAF: a benchmark for federated settings", 2018, for data by writer.
    """
    found = _label_vector("by_group", "groups", groups)
    names, codes, sizes = np.unique(found, return_inverse=True, return_counts=True)
    _check_parts("by_group", parts, len(names), "groups")
    mixed = np.random.default_rng(seed).permutation(len(names))
    filled = np.zeros(parts, np.int64)
    home = np.empty(len(names), np.int64)
    for group in mixed[np.argsort(-sizes[mixed], kind="stable")]:
        home[group] = np.argmin(filled)
        filled[home[group]] += sizes[group]
    place = home[codes]
    return [np.flatnonzero(place == part) for part in range(parts)]


def _label_vector(function: str, argument: str, labels: npt.ArrayLike) -> npt.NDArray[Any]:
    found = np.asarray(labels)
    if found.ndim != 1 or not len(found):
        raise ArgumentError(
            f"{function}: argument {argument}: expected one for each sample, a vector of at least "
            f"one element, got shape {found.shape}"
        )
    return found


def _check_parts(function: str, parts: int, there: int, what: str, each: int = 1) -> None:
    checked_integer(f"{function}: argument parts", parts, 1)
    if parts * each > there:
        raise ArgumentError(
            f"{function}: argument parts: {parts} parts need at least {parts * each} {what}, got "
            f"{there}; expected at most {there // each} parts"
        )


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
    """Draw the number of samples of each label in each part, as one stacked bar per part.

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
