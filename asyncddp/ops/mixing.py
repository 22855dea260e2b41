"""The arithmetic of one weighted average, and the exchange that feeds it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from asyncddp.engine import Desk, Steps, Stream
from asyncddp.engine.desk import Rows
from asyncddp.engine.stream import Source
from asyncddp.memory.allocate import empty
from asyncddp.memory.dtypes import DTYPES, Kind
from asyncddp.memory.streams import streams_of
from asyncddp.memory.views import on_host
from asyncddp.ops.device_mixing import exchange_and_mix_on_device
from asyncddp.ops.door import form_of

__all__ = ["Mixing", "exchange_and_mix", "fits", "mix", "row_in_words"]


@dataclass(frozen=True)
class Mixing:
    """One rank's row of a mixing matrix, and what it sends.

    Attributes:
        self_weight: Weight of the own tensor.
        src_weights: Weight of each tensor received.
        dst_weights: Factor with which each tensor is sent.
        row_of: Gives the row that a target has by the topology of this rank, if that is in use.
    """

    self_weight: float
    src_weights: Mapping[int, float]
    dst_weights: Mapping[int, float]
    row_of: Callable[[int], str] | None = field(default=None, compare=False, repr=False)

    def without(self, sources: Collection[int]) -> Mixing:
        r"""Let the own tensor have the weights of some ranks.

        .. math:: w'_{ii} = w_{ii} + \sum_{j \in D} w_{ij}, \qquad w'_{ij} = w_{ij}\ (j \notin D)

        Args:
            sources: D.
        """
        moved = [weight for source, weight in self.src_weights.items() if source in sources]
        if not moved:
            return self
        kept = {s: weight for s, weight in self.src_weights.items() if s not in sources}
        return Mixing(math.fsum([self.self_weight, *moved]), kept, self.dst_weights)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Ranks to receive from, ascending, so that results do not depend on who came first."""
        return tuple(sorted(self.src_weights))

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """Ranks to send to, ascending."""
        return tuple(sorted(self.dst_weights))

    @cached_property
    def alike(self) -> float | None:
        """The factor of all targets, if it is the same."""
        factors = set(self.dst_weights.values()) or {1.0}
        return factors.pop() if len(factors) == 1 else None

    @cached_property
    def uniform(self) -> bool:
        """Whether it is the plain mean, which is formed as a sum and one division."""
        share = 1.0 / (len(self.src_weights) + 1)
        weights = (self.self_weight, *self.src_weights.values())
        return all(math.isclose(weight, share, rel_tol=1e-12) for weight in weights)

    @cached_property
    def between(self) -> float | None:
        """The weight of the only neighbour, where it and the own one add up to 1."""
        weights = list(self.src_weights.values())
        if len(weights) == 1 and math.isclose(self.self_weight + weights[0], 1.0, rel_tol=1e-12):
            return weights[0]
        return None

    @cached_property
    def swaps(self) -> bool:
        """Whether it mixes with one neighbour by one weight, and sends the tensor as it is."""
        return self.between is not None and self.alike == 1.0

    @property
    def overwrites(self) -> bool:
        """Whether the sum may be formed in the memory of the first neighbour's tensor."""
        return self.between is not None or (self.uniform and bool(self.src_weights))

    def rows(self) -> Rows:
        """The row in words, and the rows that targets have by this rank's topology; for messages.

        Example:
            >>> Mixing(0.5, {2: 0.25, 1: 0.25}, {}).rows()
            ('(own 0.5, rank 1: 0.25, rank 2: 0.25)', {})
        """
        row_of = self.row_of
        others = {} if row_of is None else {peer: row_of(peer) for peer in self.targets}
        return row_in_words(self.self_weight, self.src_weights), others

    def combine(
        self, own: torch.Tensor, others: Sequence[torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum, written into ``out``, which may be ``own``; all of one dtype."""
        if self.between is not None:
            return torch.lerp(own, others[0], self.between, out=out)
        if not others:
            return torch.mul(own, self.self_weight, out=out)
        if self.uniform:
            torch.add(own, others[0], out=out)
            for other in others[1:]:
                out.add_(other)
            return out.div_(len(others) + 1)
        torch.mul(own, self.self_weight, out=out)
        for peer, other in zip(self.sources, others, strict=True):
            out.add_(other, alpha=self.src_weights[peer])
        return out

    def combine_in(
        self,
        dtype: torch.dtype,
        own: torch.Tensor,
        others: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """The weighted sum, formed in a dtype that may be wider than that of the tensors."""
        if own.dtype == dtype:
            self.combine(own, others, out)
            return
        wide = own.to(dtype)
        self.combine(wide, [other.to(dtype) for other in others], wide)
        out.copy_(wide.round_() if DTYPES[out.dtype].kind is Kind.INTEGER else wide)


def row_in_words(own: float, sources: Mapping[int, float]) -> str:
    """A row of W as text: ranks that have the same weights get the same text."""
    return f"(own {own:.12g}{''.join(f', rank {r}: {sources[r]:.12g}' for r in sorted(sources))})"


def exchange_and_mix(
    desk: Desk,
    tensor: torch.Tensor,
    mixing: Mixing,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> Steps[torch.Tensor]:
    r"""Send a tensor, receive the neighbours', and give the weighted sum.

    .. math:: y_i = w_{ii} x_i + \sum_j w_{ij} d_{ji} x_j

    Args:
        desk: Of the verb.
        tensor: :math:`x_i`.
        mixing: The weights.
        dtype: In which sums are formed.
        out: Where the result may be written.

    Returns:
        :math:`y_i` in the tensor's dtype, where the wire has it: in ``out`` where that is possible.
    """
    streams = streams_of(tensor)
    if streams is not None:
        there = exchange_and_mix_on_device(desk, tensor, mixing, dtype, out, streams)
        return (yield from there)
    own = on_host(tensor)
    rows = mixing.rows() if desk.check else None
    stream = desk.stream(form_of(desk.verb, own), mixing.sources, mixing.dst_weights, rows)
    by_message = [peer for peer in sorted(mixing.dst_weights) if peer not in stream.targets]
    for peer in by_message:
        factor = mixing.dst_weights[peer]
        desk.send(stream, peer, own if factor == 1.0 else own * factor)
    if by_message and fits(out, own) and _same(out, own):
        yield stream.sent()
    result = yield from mix(stream, own, mixing, dtype, out)
    yield stream.sent()
    return result


def mix(
    stream: Stream,
    own: torch.Tensor,
    mixing: Mixing,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    start: int = 0,
) -> Steps[torch.Tensor]:
    """Show a tensor piece by piece, and mix the pieces that the neighbours show.

    Args:
        stream: The exchange; what goes by message has been sent.
        own: A contiguous tensor on the host.
        mixing: The weights.
        dtype: In which sums are formed.
        out: Where the result may be written.
        start: Pieces that are mixed already.
    """
    result = out if fits(out, own) else None
    flat, cut = own.reshape(-1), stream.cut
    factor = mixing.dst_weights[stream.targets[0]] if stream.targets else 1.0
    place = None
    if stream.targets and factor == 1.0 and not _same(result, own):
        place = stream.place_of(own)  # in place, neighbours would read what is being written
    for number in range(start, cut.pieces):
        while not stream.at(number).done():
            yield stream
        stream.put(number, flat, factor, place)
        others = []
        for source in stream.sources:
            others.append((yield from _piece(source, number)))
        result = _room(stream, own, mixing, dtype) if result is None else result
        into = result.detach().view(-1)
        begun = 0 if stream.recorder is None else time.monotonic_ns()
        piece = cut.piece(into, number)
        mixing.combine_in(dtype, cut.piece(flat, number), others, piece)
        if stream.recorder is not None:
            _note(stream, mixing, begun, piece)
        del others
        for source in stream.sources:
            source.release()
    if place is not None:
        taken = stream.taken(cut.pieces)
        while not taken.done():
            yield taken
    return own if result is None else result


def _note(stream: Stream, mixing: Mixing, begun: int, piece: torch.Tensor) -> None:
    """Note that a piece was mixed."""
    if stream.recorder is not None:
        facts = stream.verb, stream.key.name, begun, time.monotonic_ns()
        stream.recorder.mixed(*facts, piece.nbytes, mixing.sources)


def _piece(source: Source, number: int) -> Steps[torch.Tensor]:
    """Wait for a piece of a neighbour's tensor."""
    while not source.at(number).done():
        yield source
    return source.take()


def _room(stream: Stream, own: torch.Tensor, mixing: Mixing, dtype: torch.dtype) -> torch.Tensor:
    """Where the result is formed: in what has come by message, or in a tensor of its own."""
    spare = stream.received() if own.dtype == dtype and mixing.overwrites else None
    return empty(own.shape, own.dtype) if spare is None else spare


def fits(out: torch.Tensor | None, own: torch.Tensor) -> bool:
    """Whether the average of a tensor can be formed in ``out``, piece by piece."""
    return (
        out is not None
        and out.device == own.device
        and out.dtype == own.dtype
        and out.shape == own.shape
        and out.is_contiguous()
        and (_same(out, own) or _storage(out) != _storage(own))
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same(out: torch.Tensor | None, own: torch.Tensor) -> bool:
    return out is not None and out.data_ptr() == own.data_ptr()
