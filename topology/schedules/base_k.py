"""Base-(k+1) schedules: exact average after finitely many rounds, with at most k peers a round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ..checks import check_int
from ..neighbors import Neighbors, average_over
from ..schedule import Schedule, alone
from ..schedules._hyper_hypercube import HyperHypercube, factors_of

__all__ = ["base_k", "simple_base_k"]


def _place(near: Neighbors, start: int, stride: int = 1) -> Neighbors:
    """Map neighbours: node i becomes rank ``start + stride * i``."""
    sources = {start + stride * j: weight for j, weight in near.src_weights.items()}
    return Neighbors(near.self_weight, sources, tuple(start + stride * j for j in near.dst_ranks))


@dataclass(frozen=True)
class _Block:
    """Block of consecutive ranks: ``pieces`` sub-blocks, each of ``piece`` = (k+1)^p ranks."""

    start: int
    pieces: int
    piece: int

    @property
    def size(self) -> int:
        """Number of ranks of the block."""
        return self.pieces * self.piece

    @property
    def end(self) -> int:
        """First rank after the block."""
        return self.start + self.size


@dataclass(frozen=True)
class _SimpleBase:
    """Rounds of the simple base-(k+1) schedule; ``k`` is the maximum number of peers."""

    n: int
    k: int

    @cached_property
    def blocks(self) -> list[_Block]:
        """Blocks of ranks, one per digit of n in base k+1, highest first."""
        blocks: list[_Block] = []
        piece = 1
        while piece * (self.k + 1) <= self.n:
            piece *= self.k + 1
        start = 0
        while start < self.n:
            pieces = (self.n - start) // piece
            if pieces:
                blocks.append(_Block(start, pieces, piece))
                start += pieces * piece
            piece //= self.k + 1
        return blocks

    def cube(self, size: int) -> HyperHypercube:
        """Return the hyper-hypercube on ``size`` ranks."""
        return HyperHypercube(factors_of(size, self.k))

    @cached_property
    def whole(self) -> HyperHypercube:
        """Hyper-hypercube on all ranks; it has no rounds if n has a prime factor above k+1."""
        return self.cube(self.n)

    @cached_property
    def warm(self) -> int:
        """Number of rounds of the first phase, in which every block averages inside."""
        return self.cube(self.blocks[0].size).length

    @cached_property
    def length(self) -> int:
        """Number of rounds until all ranks hold the average."""
        if self.whole.length or self.n == 1:
            return self.whole.length
        return self.warm + 1 + self.cube(self.blocks[0].piece).length

    def neighbors(self, rank: int, m: int) -> Neighbors:
        """Return the neighbours of one rank in round m < length."""
        if self.whole.length or self.n == 1:
            return self.whole.neighbors(rank, m)
        own = next(i for i, block in enumerate(self.blocks) if rank < block.end)
        block = self.blocks[own]
        giving = m - self.warm  # the block that shares its average with all later ones
        if giving < 0:
            return _place(self.cube(block.size).neighbors(rank - block.start, m), block.start)
        if giving < own:
            return self._take(rank, self.blocks[giving])
        if giving == own < len(self.blocks) - 1:
            return self._give(rank, block)
        return self._settle(rank, block, m)

    def _share(self, giver: _Block) -> float:
        """Return the share of a block in the ranks from this block on."""
        return giver.size / (self.n - giver.start)

    def _take(self, rank: int, giver: _Block) -> Neighbors:
        """Return the neighbours of a later block's rank: one rank per sub-block of ``giver``."""
        order = rank - giver.end
        peers = tuple(
            giver.start + (piece + 1) * giver.piece - 1 - order for piece in range(giver.pieces)
        )
        share = self._share(giver)
        return Neighbors(1.0 - share, dict.fromkeys(peers, share / giver.pieces), peers)

    def _give(self, rank: int, block: _Block) -> Neighbors:
        """Return the neighbours of a giver's rank: a later rank, or else ranks of its own block."""
        piece, offset = divmod(rank - block.start, block.piece)
        order = block.piece - 1 - offset
        later = self.n - block.end
        if order < later:
            share = self._share(block) / block.pieces
            return Neighbors(1.0 - share, {block.end + order: share}, (block.end + order,))
        free = block.piece - later  # in each sub-block, at its beginning
        index = piece * free + offset
        first = index - index % (self.k + 1)
        group = range(first, min(first + self.k + 1, free * block.pieces))
        ranks = [block.start + i // free * block.piece + i % free for i in group]
        return average_over(rank, ranks)

    def _settle(self, rank: int, block: _Block, m: int) -> Neighbors:
        """Return the neighbours in the last phase: sub-blocks, or small blocks, average inside."""
        size = block.size if block.size <= self.k else block.piece
        start = rank - (rank - block.start) % size
        later = self.blocks.index(block) + (block is not self.blocks[-1])
        return _place(self.cube(size).neighbors(rank - start, m - self.warm - later), start)


@dataclass(frozen=True)
class _Base:
    """Rounds of the base-(k+1) schedule: copies of a simple one, then a cube across the copies."""

    simple: _SimpleBase
    across: HyperHypercube

    @property
    def length(self) -> int:
        """Number of rounds until all ranks hold the average."""
        return self.simple.length + self.across.length

    def neighbors(self, rank: int, m: int) -> Neighbors:
        """Return the neighbours of one rank in round m < length."""
        size = self.simple.n
        copy, offset = divmod(rank, size)
        if m < self.simple.length:
            return _place(self.simple.neighbors(offset, m), copy * size)
        return _place(self.across.neighbors(copy, m - self.simple.length), offset, size)


def _log(n: int, base: int) -> int:
    """Compute the floor of the logarithm exactly."""
    power = 0
    while base ** (power + 1) <= n:
        power += 1
    return power


def simple_base_k(n: int, k: int) -> Schedule:
    r"""Build the simple base-(k+1) schedule: exact for every n, with at most k peers per round.

    The average is exact after finitely many rounds.
    With :math:`n = \sum_l a_l (k+1)^{p_l}`, the ranks are divided into blocks of
    :math:`a_l (k+1)^{p_l}`. Every block averages inside by a k-peer hyper-hypercube; then each
    block in turn shares with all later ones, rank by rank, with weight
    :math:`|V_t| / (a_t \sum_{s \ge t} |V_s|)`; then all average inside their sub-blocks of
    :math:`(k+1)^{p_l}`. Where all prime factors of n are at most k+1, it is the hyper-hypercube
    alone. :func:`base_k` is never longer.

    Args:
        n: Number of ranks.
        k: Greatest number of peers of a rank in a round.

    Returns:
        A schedule whose product over one period is J; all rounds symmetric, doubly stochastic.

    Raises:
        TopologyError: If ``n < 1`` or ``k < 1``.

    Example:
        >>> simple_base_k(12, 1).period
        7

    Reference:
        Takezawa et al., "Beyond exponential graph: communication-efficient topologies for
        decentralized learning via finite-time convergence", NeurIPS 2023, algorithm 2.
    """
    n = check_int(n, "n", "simple_base_k", 1)
    k = check_int(k, "k", "simple_base_k", 1)
    name = f"simple_base_k({n}, {k})"
    simple = _SimpleBase(n, k)
    return Schedule(name, n, simple.length, simple.neighbors) if n > 1 else alone(name)


def base_k(n: int, k: int) -> Schedule:
    r"""Build the base-(k+1) schedule, the shortest known exact one for every n and at most k peers.

    With p the greatest divisor of n whose prime factors are at most k+1, and n = p q: p copies of
    :func:`simple_base_k` on q ranks side by side, then a hyper-hypercube across the copies; or
    the simple schedule on n ranks, where that is shorter. At most
    :math:`2 \log_{k+1} n + 2` rounds.

    Args:
        n: Number of ranks.
        k: Greatest number of peers of a rank in a round; 1 sends one message a step.

    Returns:
        A schedule whose product over one period is J; all rounds symmetric, doubly stochastic.

    Raises:
        TopologyError: If ``n < 1`` or ``k < 1``.

    Example:
        >>> schedule = base_k(6, 1)
        >>> [schedule.neighbors(rank=1, k=k).src_weights for k in range(schedule.period)]
        [{0: 0.5}, {2: 0.6666666666666666}, {0: 0.5}, {4: 0.5}]

    Reference:
        Takezawa et al., "Beyond exponential graph: communication-efficient topologies for
        decentralized learning via finite-time convergence", NeurIPS 2023, algorithm 3.
    """
    n = check_int(n, "n", "base_k", 1)
    k = check_int(k, "k", "base_k", 1)
    name = f"base_k({n}, {k})"
    if n == 1:
        return alone(name)
    smooth = math.prod(j ** _log(n, j) for j in range(2, min(k + 1, n) + 1))
    copies = math.gcd(n, smooth)
    base = _Base(_SimpleBase(n // copies, k), HyperHypercube(factors_of(copies, k)))
    simple = _SimpleBase(n, k)
    rounds = base if base.length <= simple.length else simple
    return Schedule(name, n, rounds.length, rounds.neighbors)
