r"""Buckets of all ranks, on which a method's hooks run: once for all, or once for each rank.

The contract between hooks and simulation
-----------------------------------------

A hook treats each element by itself, as :class:`asyncddp.algorithms.Algorithm` asks for:
``outgoing``, ``incoming`` and the rest are sums and products of tensors of the bucket's size and of
what it receives, with the same factors on all ranks. So they run unchanged on stacked tensors:
``bucket.flat`` is ``(n, d)``, one row a rank, and so is each tensor of ``bucket.state``,
``bucket.gradient()`` and ``received.mixed``. A state that is one number a rank, such as a push-sum
weight, is ``(n, 1)``.

A method that looks at what single neighbours have sent, or keeps something for each, is not of that
kind, and says so by ``by_neighbor``. Its hooks are called for one rank after the other, with the
rank's row of the stacked tensors as the bucket, its weights as ``bucket.row``, and what its
neighbours sent in ``received``, as on real ranks.

A compressor encodes each rank's row by itself, in both cases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.compression import Compressor
from asyncddp.simulate.mixing_round import Mask, MixingRound
from asyncddp.simulate.rank_codecs import RankCodecs


class SimulatedBucket(ABC):
    """One bucket of all ranks, and the hooks of a method on it (base class).

    Args:
        method: The method.
        bucket: The bucket with the tensors of all ranks, stacked.
        compressor: Compressor of what is sent; None for none.
        of_all_ranks: The tensors of all ranks, where the bucket has those of each machine's first.

    Attributes:
        codecs: Compressors of all ranks; None where tensors travel as they are.
        of_all_ranks: The tensors of all ranks, ``(n, d)``.
        every: From one rank of the bucket to the next.
    """

    def __init__(
        self,
        method: Algorithm,
        bucket: AveragedBucket,
        compressor: Compressor | None,
        of_all_ranks: torch.Tensor | None = None,
    ) -> None:
        self.method, self.bucket = method, bucket
        self.of_all_ranks = bucket.flat if of_all_ranks is None else of_all_ranks
        ranks = bucket.nodes = len(bucket.flat)
        self.every = len(self.of_all_ranks) // ranks
        self.codecs = (
            None if compressor is None else RankCodecs(compressor, bucket.index, ranks, self.every)
        )
        if self.codecs is not None:
            bucket.compressor = self.codecs.each[0]

    @abstractmethod
    def outgoing(self, mixing: MixingRound | None) -> torch.Tensor:
        """Return what all ranks send, ``(n, d)``; ``mixing`` if it goes to neighbours."""

    @abstractmethod
    def incoming(self, arrived: StackedExchangeResult) -> None:
        """Update all ranks from what has arrived."""

    @abstractmethod
    def restart(self, mixing: MixingRound | None) -> None:
        """Let the method begin anew, since others take part from now on.

        Args:
            mixing: Who averages with whom from now on; None if not with neighbours.
        """

    @property
    def travelling_states(self) -> Mapping[str, torch.Tensor]:
        """Tensors that travel along, stacked, by name."""
        return self.method.travelling_state(self.bucket)

    @property
    def each(self) -> Sequence[AveragedBucket]:
        """Return the buckets on which hooks run one after the other."""
        return [self.bucket]

    def begin_round(self, number: int, active: Mask) -> None:
        """Tell the buckets of a round, and of the ranks that have not left."""
        for one in self.each:
            one.round = number

    def clear_padding(self) -> None:
        """Write zeros between parameters, of which compressors would lose something."""
        self.bucket.clear_padding()


@dataclass(frozen=True)
class StackedExchangeResult:
    """What the exchange of one bucket has brought to all ranks.

    Attributes:
        decoded: What each rank has sent, as its receivers decode it, ``(n, d)``.
        mixed: Its average on each rank, ``(n, d)``.
        states: The averages of the tensors of the state that travel along, by name.
        mixing: Who averages with whom; None if not with neighbours.
    """

    decoded: torch.Tensor
    mixed: torch.Tensor
    states: Mapping[str, torch.Tensor]
    mixing: MixingRound | None
