"""``power_gossip``: low-rank gossip by one matrix-vector product per matrix and neighbour."""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import (
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
)
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.compression import Compressor
from asyncddp.compression.counter_random import normal, random_words
from asyncddp.errors import ArgumentError
from asyncddp.topology import symmetric_exponential

_DIRECTION = "direction of rank {}"


class _ParameterMatrix(NamedTuple):
    """Parameter in a round of PowerGossip, as a matrix that is multiplied by a vector."""

    name: str
    view: torch.Tensor
    matrix: torch.Tensor
    whole: bool
    transposed: bool

    @property
    def sent(self) -> int:
        """Number of elements that are sent for this parameter."""
        return self.matrix.numel() if self.whole else len(self.matrix)


class PowerGossip(Algorithm):
    r"""PowerGossip: neighbours average along one direction per matrix, found by power iteration.

    .. math:: d_{ij} = (X_j - X_i)\, p_{ij}, \qquad
              X_i \leftarrow X_i + \sum_j w_{ij}\, d_{ij}\, p_{ij}^\top, \qquad
              p_{ij} \leftarrow \frac{d_{ij}}{\lVert d_{ij} \rVert}

    for each matrix X after the optimizer's step, and with transposed matrices in every second
    round: a power iteration, in which :math:`p_{ij}` approaches the direction in which the two
    ranks differ most. The ranks of an edge send each other :math:`X_i p_{ij}` and
    :math:`X_j p_{ij}`, one column or row of the matrix; tensors with one dimension, or of a single
    row or column, are sent in full, as with ``adapt_then_combine``. Dimensions after the first are
    flattened. There is nothing to tune. A rank keeps :math:`p_{ij}` for each neighbour, equal at
    both ends; the first ones are random. The mean over ranks changes by the optimizers' steps
    alone.

    Args:
        hierarchical: Whether the graph's nodes are machines, whose ranks average first and hold one
            model after each exchange.

    References:
        Vogels, Karimireddy, Jaggi, "Practical low-rank communication compression in decentralized
        deep learning", NeurIPS 2020.
    """

    name = "power_gossip"
    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.NEIGHBORS, CommunicationPattern.MACHINES)
    default_graph = symmetric_exponential
    needs = TopologyRequirements(doubly_stochastic=True, symmetric=True, static_only=True)
    compression = CompressionUse.DIFFERENCES
    by_neighbor = True

    def __init__(self, *, hierarchical: bool = False) -> None:
        if hierarchical:
            self.default_communication = "hierarchical_neighbor_allreduce"

    @override
    def messages_of(self, shape: Sequence[int]) -> float:
        rows, columns = _matrix_of(shape)
        return (rows + columns) / (2 * rows * columns) if columns > 1 else 1.0

    @override
    def check_compressor(self, compressor: Compressor) -> None:
        raise ArgumentError(
            f"argument compression: {self.name} compresses by itself, to a row or column of each "
            f"matrix; expected None, or algorithm='choco_sgd', got {compressor!r}"
        )

    @override
    def restart(self, bucket: AveragedBucket, neighbors: NeighborTensors) -> None:
        bucket.vectors.clear()  # a new neighbour knows none, and both ends need the same

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        return bucket.new_state().new_empty(sum(one.sent for one in _matrices_of(bucket)))

    @override
    def outgoing_to_each(
        self, bucket: AveragedBucket, sent: torch.Tensor
    ) -> Mapping[int, torch.Tensor] | None:
        row = bucket.row
        assert row is not None
        one_way = sorted({*row.sources} ^ {*row.targets})
        if one_way:
            raise ArgumentError(
                f"arguments topology, src_weights, dst_weights: {self.name} needs edges that go "
                f"both ways, as a difference is found by its two ends; rank {bucket.rank} has one "
                f"with rank {one_way[0]} that does not"
            )
        return {rank: self._message(bucket, rank, sent) for rank in row.targets}

    def _message(self, bucket: AveragedBucket, rank: int, like: torch.Tensor) -> torch.Tensor:
        """Compute the message of an edge: the products of all matrices with their directions."""
        message, at = like.new_empty(like.shape), 0
        for place in _matrices_of(bucket):
            part = message[at : (at := at + place.sent)]
            matrix = place.matrix.to(part.dtype)
            if place.whole:
                part.copy_(matrix.flatten())
            else:
                torch.mv(matrix, _direction(bucket, rank, place, part), out=part)
        return message

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        row = bucket.row
        assert row is not None
        for rank in received.sources:
            own = received.sent_to_each[rank]
            apart = own.new_zeros(own.shape)
            received.add_to(apart, rank)
            apart.sub_(own)
            places, at = list(_matrices_of(bucket)), 0
            for place in places:
                part = apart[at : (at := at + place.sent)]
                self._apply(bucket, rank, place, part, row.src_weights[rank])

    def _apply(
        self,
        bucket: AveragedBucket,
        rank: int,
        place: _ParameterMatrix,
        apart: torch.Tensor,
        weight: float,
    ) -> None:
        """Update one matrix by an edge's difference, which gives the next round's direction."""
        if place.whole:
            place.view.add_(apart.view(place.view.shape), alpha=weight)
            return
        direction = _direction(bucket, rank, place, apart)
        change = torch.outer(apart, direction)
        change = change.t() if place.transposed else change
        place.view.add_(change.reshape(place.view.shape), alpha=weight)
        length = float(apart.norm())
        if bucket.rank > rank:
            apart = -apart  # both ends go on with the same one
        known = bucket.vectors[_DIRECTION.format(rank)]
        if 0.0 < length < math.inf:
            known[place.name] = apart / length
        else:
            del known[place.name]  # a random one follows


def _matrices_of(bucket: AveragedBucket) -> Iterator[_ParameterMatrix]:
    transposed = bucket.round % 2 == 1
    for name, view in zip(bucket.names, bucket.views_of(bucket.flat), strict=True):
        rows, columns = _matrix_of(view.shape)
        matrix = view.reshape(rows, columns)
        whole = columns == 1
        yield _ParameterMatrix(
            name, view, matrix.t() if transposed and not whole else matrix, whole, transposed
        )


def _matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a tensor as a matrix; one column if it is sent in full."""
    numel = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else numel
    columns = numel // rows
    return (rows, columns) if min(rows, columns) > 1 else (numel, 1)


def _direction(
    bucket: AveragedBucket, rank: int, place: _ParameterMatrix, like: torch.Tensor
) -> torch.Tensor:
    """Return the direction of an edge for a matrix: from the last round, or a random one."""
    known = bucket.vectors.setdefault(_DIRECTION.format(rank), {})
    size = place.matrix.shape[1]
    if place.name not in known or len(known[place.name]) != size:
        low, high = sorted((bucket.rank, rank))
        seed = zlib.crc32(f"{low} {high} {place.name}".encode())
        drawn = normal(random_words(seed, size, like.device))
        known[place.name] = (drawn / drawn.norm()).to(like.dtype)
    return known[place.name]
