"""Mixing matrix of one round, applied to the stacked tensors of all ranks."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from asyncddp.kernels.weight_row import WeightRow
from asyncddp.simulate.scenario import Mask, Numbers
from asyncddp.tensors.allocation import make_tensor
from asyncddp.topology import Schedule
from asyncddp.topology.matrices import Matrix, matrix_of

_DENSE_RANKS = 64  # up to which a dense product is as fast as a sparse one
_DENSE_SHARE = 8  # … and from 1 / 8 of all entries on

Indices = npt.NDArray[np.intp]


class MixingRound:
    r"""Mixing matrix of one round: messages between ranks, and their averaging weights.

    .. math:: y_i = \sum_j w_{ij} z_j

    Attributes:
        matrix: W, by its entries.
        sources, targets: The rank that sends each message, and the one that gets it.
    """

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        off = matrix.rows != matrix.columns
        self.sources, self.targets = matrix.columns[off], matrix.rows[off]
        self._products: dict[torch.dtype, torch.Tensor] = {}

    @classmethod
    def of(cls, schedule: Schedule, number: int) -> MixingRound:
        """Return the mixing round of a schedule's round ``number``."""
        return cls(matrix_of(schedule, number))

    def mix(self, stacked: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of stacked tensors, ``(n, …)``, in the same dtype."""
        weights, rows = self._weights(stacked), stacked.flatten(1)
        if weights.layout == torch.sparse_coo:
            product: torch.Tensor = torch.sparse.mm(weights, rows)
        else:
            product = weights @ rows
        return product.view(stacked.shape)

    @cached_property
    def own_weights(self) -> Numbers:
        """Weight of each rank's own tensor, ``(n,)``."""
        matrix = self.matrix
        diagonal = matrix.rows == matrix.columns
        own = np.bincount(matrix.rows[diagonal], matrix.values[diagonal], matrix.n)
        return own.astype(np.float64)

    @cached_property
    def messages_sent(self) -> Indices:
        """Number of messages that each rank sends, ``(n,)``."""
        return np.bincount(self.sources, minlength=self.matrix.n)

    @cached_property
    def weight_rows(self) -> list[WeightRow]:
        """Averaging weights of each rank, in the form that real ranks use."""
        matrix = self.matrix
        received: list[dict[int, float]] = [{} for _ in range(matrix.n)]
        sent: list[dict[int, float]] = [{} for _ in range(matrix.n)]
        entries = matrix.rows.tolist(), matrix.columns.tolist(), matrix.values.tolist()
        for target, source, weight in zip(*entries, strict=True):
            if target != source:
                received[target][source] = weight
                sent[source][target] = 1.0
        own = self.own_weights.tolist()
        return [WeightRow(*weights) for weights in zip(own, received, sent, strict=True)]

    def without(self, lost: Mask, *, kept_by_sender: bool = False) -> MixingRound:
        """Return the round without lost messages; their weights go to the receivers' own tensors.

        Args:
            lost: For each message, whether it is lost.
            kept_by_sender: Whether weights are the senders' own, by which columns keep their sums
                in place of rows.
        """
        if not lost.any():
            return self
        matrix = self.matrix
        off = matrix.rows != matrix.columns
        gone = np.zeros(len(matrix.rows), dtype=bool)
        gone[off] = lost
        values = matrix.values.copy()
        keepers = matrix.columns if kept_by_sender else matrix.rows
        moved = np.bincount(keepers[gone], values[gone], matrix.n)
        values[~off] += moved[matrix.rows[~off]]
        kept = ~gone
        return MixingRound(Matrix(matrix.n, matrix.rows[kept], matrix.columns[kept], values[kept]))

    def mean_among(self, active: Mask) -> MixingRound:
        r"""Return a uniform round in which all ranks take the mean over the active ranks.

        .. math:: w_{ij} = 1 / |T|\ (j \in T), \qquad w_{ij} = 0\ (j \notin T)

        Args:
            active: For each rank, whether it is in T.
        """
        matrix = self.matrix
        kept = active[matrix.columns]
        rows, columns = matrix.rows[kept], matrix.columns[kept]
        return MixingRound(Matrix(matrix.n, rows, columns, np.full(len(rows), 1 / active.sum())))

    def between_machines(self, local: int) -> MixingRound:
        r"""Return the round over all ranks from this one over machines.

        .. math:: W \otimes \tfrac1L 1 1^T

        As on real ranks each sends an L-th of its tensor to the same rank of a neighbour machine,
        and three times to each rank of its own.

        Args:
            local: Ranks of a machine, L.
        """
        matrix = self.matrix
        inside = np.indices((local, local)).reshape(2, -1)
        rows = np.add.outer(matrix.rows * local, inside[0]).ravel()
        columns = np.add.outer(matrix.columns * local, inside[1]).ravel()
        order = np.lexsort((columns, rows))
        values = np.repeat(matrix.values / local, local * local)
        spread = Matrix(matrix.n * local, rows[order], columns[order], values[order])
        found = MixingRound(spread)
        ranks = np.arange(matrix.n * local)
        first = ranks - ranks % local
        local_pairs = [(ranks, first + (ranks + k) % local) for k in range(1, local)] * 3
        others = [(self.sources * local + k, self.targets * local + k) for k in range(local)]
        pairs = [*local_pairs, *others]
        found.sources = np.concatenate([source for source, _ in pairs])
        found.targets = np.concatenate([target for _, target in pairs])
        return found

    def between_leaders(self, local: int) -> MixingRound:
        """Return the messages of a round in which only each machine's first rank averages.

        Ranks of a machine wait for its first rank, and it for them; messages inside machines do not
        count.

        Args:
            local: Ranks of a machine.
        """
        matrix = self.matrix
        n, rows, columns = matrix.n * local, matrix.rows * local, matrix.columns * local
        found = MixingRound(Matrix(n, rows, columns, matrix.values))
        _ = found.messages_sent  # which keeps those between machines
        others = np.arange(n)[np.arange(n) % local > 0]
        firsts = others - others % local
        found.sources = np.concatenate([found.sources, others, firsts])
        found.targets = np.concatenate([found.targets, firsts, others])
        return found

    def push_round(self) -> MixingRound:
        r"""Return the push-sum round, in which each rank keeps and sends equal shares.

        .. math:: a_{ij} = 1 / (d_j + 1)

        with :math:`d_j` the messages that rank j sends; weights of the graph are ignored.
        """
        matrix = self.matrix
        shares = 1.0 / (self.messages_sent[matrix.columns].astype(np.float64) + 1.0)
        return MixingRound(Matrix(matrix.n, matrix.rows, matrix.columns, shares))

    def _weights(self, like: torch.Tensor) -> torch.Tensor:
        """Return W in the dtype and on the device of a tensor; sparse if that is faster."""
        if like.dtype not in self._products:
            matrix, n = self.matrix, self.matrix.n
            if n <= _DENSE_RANKS or _DENSE_SHARE * len(matrix.values) >= n * n:
                weights = make_tensor(matrix.dense(), like.dtype, like.device)
            else:
                places = make_tensor(np.stack([matrix.rows, matrix.columns]), torch.int64)
                values = make_tensor(matrix.values, like.dtype)
                size, device = (n, n), values.device
                weights = torch.sparse_coo_tensor(
                    places, values, size, device=device, check_invariants=True
                )
                weights = weights.coalesce().to(like.device)
            self._products[like.dtype] = weights
        return self._products[like.dtype]
