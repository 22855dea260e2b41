"""Weight row: one rank's averaging weights, a row of the mixing matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from asyncddp.kernels.cpu_weighted_sum import WEIGHT_TOLERANCE
from asyncddp.tensors.dtypes import DTYPES, DtypeKind
from asyncddp.tensors.means import sum_of


@dataclass(frozen=True)
class WeightRow:
    """One rank's row of the mixing matrix: own weight, weight per source, send factor per target.

    ``row_of`` returns a target rank's own weight and source weights according to this rank's
    topology; it is None if the weights do not come from a topology. With ``by_hand``, this rank's
    weights are set by the user, and only those of ``row_of`` come from the topology.
    """

    self_weight: float
    src_weights: Mapping[int, float]
    dst_weights: Mapping[int, float]
    row_of: Callable[[int], tuple[float, Mapping[int, float]]] | None = field(
        default=None, compare=False, repr=False
    )
    by_hand: bool = field(default=False, compare=False, repr=False)

    def without(self, sources: Collection[int]) -> WeightRow:
        r"""Return the row without some sources, whose weights are added to the own weight.

        .. math:: w'_{ii} = w_{ii} + \sum_{j \in D} w_{ij}, \qquad w'_{ij} = w_{ij}\ (j \notin D)
        """
        moved = [weight for source, weight in self.src_weights.items() if source in sources]
        if not moved:
            return self
        kept = {s: weight for s, weight in self.src_weights.items() if s not in sources}
        return WeightRow(math.fsum([self.self_weight, *moved]), kept, self.dst_weights)

    def times(self, counts: Mapping[int, int]) -> WeightRow:
        r"""Return the row with the weights of sources multiplied by counts, and a sum of 1.

        .. math:: w'_{ii} = w_{ii} / s, \qquad w'_{ij} = c_j w_{ij} / s, \qquad
                  s = w_{ii} + \sum_j c_j w_{ij}

        Sources with a count of 0 are left out.
        """
        weights = {source: weight * counts[source] for source, weight in self.src_weights.items()}
        total = math.fsum([self.self_weight, *weights.values()])
        kept = {source: weight / total for source, weight in weights.items() if weight}
        return WeightRow(self.self_weight / total, kept, self.dst_weights)

    def between(self, ranks: Sequence[int]) -> WeightRow:
        """Return the row with node k of the graph replaced by rank ``ranks[k]``."""
        sources = {ranks[node]: weight for node, weight in self.src_weights.items()}
        targets = {ranks[node]: factor for node, factor in self.dst_weights.items()}
        return WeightRow(self.self_weight, sources, targets)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Ranks to receive from, ascending, which is the order of summation."""
        return tuple(sorted(self.src_weights))

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """Ranks to send to, ascending."""
        return tuple(sorted(self.dst_weights))

    @cached_property
    def common_factor(self) -> float | None:
        """The send factor if it is the same for all targets; None otherwise."""
        factors = set(self.dst_weights.values()) or {1.0}
        return factors.pop() if len(factors) == 1 else None

    @cached_property
    def is_uniform(self) -> bool:
        """True if all weights are equal: the mean is then computed as a sum and one division."""
        share = 1.0 / (len(self.src_weights) + 1)
        weights = (self.self_weight, *self.src_weights.values())
        return all(math.isclose(weight, share, rel_tol=WEIGHT_TOLERANCE) for weight in weights)

    @property
    def is_silent(self) -> bool:
        """True if this rank's own weight is zero and it sends to nobody."""
        return self.self_weight == 0.0 and not self.dst_weights

    @cached_property
    def lerp_weight(self) -> float | None:
        """The weight of the only source, if that and the own weight add up to 1; else None."""
        weights = list(self.src_weights.values())
        if len(weights) != 1:
            return None
        total = self.self_weight + weights[0]
        return weights[0] if math.isclose(total, 1.0, rel_tol=WEIGHT_TOLERANCE) else None

    @cached_property
    def is_pairwise(self) -> bool:
        """True if one source's weight and the own weight add up to 1, and send factors are 1."""
        return self.lerp_weight is not None and self.common_factor == 1.0

    @property
    def reuses_received(self) -> bool:
        """True if the sum can be computed in the memory of the first received tensor."""
        return self.lerp_weight is not None or (self.is_uniform and bool(self.src_weights))

    def describe_rows(self) -> tuple[str, Mapping[int, str]]:
        """Format this row, and its targets' rows by this rank's topology, for comparison by ranks.

        The text of this row is empty if its weights are not the topology's.

        Example:
            >>> row = WeightRow(0.5, {2: 0.25, 1: 0.25}, {1: 1.0}, lambda rank: (1.0, {}))
            >>> row.describe_rows()
            ('(own 0.5, rank 1: 0.25, rank 2: 0.25)', {1: '(own 1)'})
        """
        row_of = self.row_of
        if row_of is None:
            return "", {}
        others = {rank: format_weight_row(*row_of(rank)) for rank in self.targets}
        own = "" if self.by_hand else format_weight_row(self.self_weight, self.src_weights)
        return own, others

    def weighted_sum(
        self, own: torch.Tensor, others: Sequence[torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        """Write the weighted sum into ``out``, which may be ``own`` and has its dtype.

        ``others`` may have a narrower dtype, except if the sum is computed by ``lerp``.
        """
        if self.lerp_weight is not None:
            return torch.lerp(own, others[0], self.lerp_weight, out=out)
        if not others:
            return torch.mul(own, self.self_weight, out=out)
        if self.is_uniform:
            return sum_of([own, *others], len(others) + 1, out)
        torch.mul(own, self.self_weight, out=out)
        for peer, other in zip(self.sources, others, strict=True):
            out.add_(other, alpha=self.src_weights[peer])
        return out

    def weighted_sum_in(
        self,
        dtype: torch.dtype,
        own: torch.Tensor,
        others: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Write the weighted sum into ``out``, accumulated in ``dtype``, which may be wider."""
        if own.dtype == dtype:
            self.weighted_sum(own, others, out)
            return
        wide = own.to(dtype)
        if self.lerp_weight is not None:
            others = [others[0].to(dtype)]
        self.weighted_sum(wide, others, wide)
        out.copy_(wide.round_() if DTYPES[out.dtype].kind is DtypeKind.INTEGER else wide)


def format_weight_row(own: float, sources: Mapping[int, float]) -> str:
    """Format a row of the mixing matrix as text; equal rows give equal text."""
    return f"(own {own:.12g}{''.join(f', rank {r}: {sources[r]:.12g}' for r in sorted(sources))})"
