"""Base class of compressors, which encode floating-point tensors into fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, TypeAlias

import torch
from typing_extensions import override

from asyncddp.errors import ArgumentError, DtypeError
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.dtypes import DTYPES, DtypeKind

CompressorState: TypeAlias = dict[str, torch.Tensor]
"""State that a compressor keeps from one tensor to the next, such as an error-feedback residual."""

State: TypeAlias = CompressorState | None
Views: TypeAlias = list[torch.Tensor]
"""Views of the fields of encoded rows, each ``(K, elements)``."""

Fields: TypeAlias = tuple[tuple[int, torch.dtype], ...]
"""Number of elements and dtype of each field of an encoded chunk."""

ROW_ALIGNMENT = 8
"""Alignment of encoded rows in bytes, so that their fields can be viewed as any dtype."""


class Compressor(ABC):
    r"""Base class of compressors: encode each chunk of a tensor into a fixed number of bytes.

    A compressor :math:`Q` takes K chunks of S elements each, as a contiguous tensor of shape
    ``(K, S)`` in float16, bfloat16, float32 or float64, and encodes each chunk by itself into
    :math:`B = \mathrm{encoded\_size}(S)` bytes, a row of a uint8 tensor of shape ``(K, B)``; a
    flat tensor is one chunk, and S is at least 1. Decoding needs nothing but the bytes. The same
    chunks, seed and state give the same bytes, all of which are written. Compressors are immutable
    and hold options only: the caller keeps the state of each tensor that is sent repeatedly.

    A chunk that contains NaN or an infinity is encoded without an error, and decodes to a chunk
    that contains NaN or an infinity too, so that the receiver can detect it; other chunks are
    unaffected.

    Other distributions add compressors under the entry-point group ``asyncddp.compressors``; the
    conformance tests run over the registry and hold each to what it declares.

    Attributes:
        name: Name in the registry and the literature.
        unbiased: Whether :math:`\mathbb{E}\, Q(x) = x`, over seeds.
        wants_error_feedback: Whether averages of gradients need error feedback to converge.
        needs_state: Whether it must be given a state.
        costly_with: Options of optimizers, such as ``momentum``, with which averages of gradients
            so encoded, with error feedback, were seen to cost accuracy at an unchanged step size.
    """

    name: ClassVar[str]
    unbiased: bool = False
    wants_error_feedback: bool = False
    needs_state: ClassVar[bool] = False
    costly_with: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        """Compute the size of an encoded chunk in bytes, a multiple of 8.

        Args:
            numel: Elements of the chunk, S.
            dtype: Their dtype.

        Raises:
            ArgumentError: A chunk of that size cannot be encoded with the options given.
        """

    @abstractmethod
    def encode(
        self,
        chunks: torch.Tensor,
        encoded: torch.Tensor,
        *,
        seed: int = 0,
        state: CompressorState | None = None,
    ) -> None:
        """Encode chunks into ``encoded``, without changing them.

        Args:
            chunks: Shape ``(K, S)``, contiguous, outside autograd.
            encoded: Written to, all of it; uint8 of shape ``(K, B)``, contiguous, at an address
                that is a multiple of 8, on the same device.
            seed: Of random choices, from 0 to 2⁶³ − 1.
            state: State from :meth:`new_state`, which is updated; None for no state.
        """

    @abstractmethod
    def decode(self, encoded: torch.Tensor, chunks: torch.Tensor) -> None:
        """Decode ``encoded`` into ``chunks``; shapes and dtypes as for :meth:`encode`."""

    def decode_add(self, encoded: torch.Tensor, chunks: torch.Tensor, weight: float = 1.0) -> None:
        """Add ``weight`` times the decoded chunks to ``chunks``."""
        decoded = empty(chunks.shape, chunks.dtype, chunks.device)
        self.decode(encoded, decoded)
        chunks.add_(decoded, alpha=weight)

    def new_state(self, chunks: torch.Tensor) -> CompressorState:
        """Make the initial state for a tensor of the shape, dtype and device of ``chunks``."""
        return {}

    def contraction(self, numel: int) -> float | None:
        r"""Return the contraction factor δ for chunks of ``numel`` elements; None if there is none.

        .. math:: \mathbb{E} \lVert Q(x) - x \rVert^2 \le (1 - \delta) \lVert x \rVert^2,
                  \qquad 0 < \delta \le 1

        for all x, up to the rounding of x's dtype.
        """
        return None

    def bits_per_element(self, numel: int, dtype: torch.dtype = torch.float32) -> float:
        """Compute the mean number of encoded bits per element of a chunk of ``numel`` elements."""
        return 8 * self.encoded_size(numel, dtype) / numel


class FieldCompressor(Compressor):
    """Base class of compressors that encode a chunk as zero-padded fields: a scale, values, ..."""

    alignment: ClassVar[int] = ROW_ALIGNMENT
    """Alignment of fields in bytes, a multiple of 8."""

    @abstractmethod
    def fields(self, numel: int, dtype: torch.dtype) -> Fields:
        """Return number of elements and dtype of each field of an encoded chunk.

        Args:
            numel: Elements of the chunk.
            dtype: Their dtype.
        """

    @override
    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        fields = self.fields(numel, dtype)
        return sum([padded(count * kind.itemsize, self.alignment) for count, kind in fields])

    @override
    def encode(
        self,
        chunks: torch.Tensor,
        encoded: torch.Tensor,
        *,
        seed: int = 0,
        state: CompressorState | None = None,
    ) -> None:
        self.encode_into(self.views(encoded, chunks, clear=True), chunks, seed, state)

    @abstractmethod
    def encode_into(self, fields: Views, chunks: torch.Tensor, seed: int, state: State) -> None:
        """Encode chunks into the fields of encoded rows; arguments as for :meth:`encode`."""

    def views(self, encoded: torch.Tensor, chunks: torch.Tensor, *, clear: bool = False) -> Views:
        """Return views of the fields of encoded rows; ``clear`` writes zeros to the padding."""
        found, start = [], 0
        for count, kind in self.fields(chunks.shape[1], chunks.dtype):
            end = start + count * kind.itemsize
            found.append(encoded[:, start:end].view(kind))
            start = padded(end, self.alignment)
            if clear and start > end:
                encoded[:, end:start] = 0
        return found


def require_compressible(what: str, tensor: torch.Tensor) -> None:
    """Raise a DtypeError unless the tensor's dtype is a float; ``what`` begins the message."""
    traits = DTYPES.get(tensor.dtype)
    if traits is None or traits.kind is not DtypeKind.FLOAT:
        floats = ", ".join(row.name for row in DTYPES.values() if row.kind is DtypeKind.FLOAT)
        raise DtypeError(
            f"{what}: compression expects one of {floats}, got {tensor.dtype}; send it without "
            "compression"
        )


def require_chunks(what: str, chunks: torch.Tensor) -> None:
    """Raise an error unless a tensor can be encoded as chunks; ``what`` begins the message."""
    require_compressible(what, chunks)
    if chunks.dim() != 2 or not chunks.shape[1] or not chunks.is_contiguous():
        raise ArgumentError(
            f"{what}: argument chunks: expected a contiguous tensor of shape (K, S) with S at "
            f"least 1, got shape {tuple(chunks.shape)} and strides {chunks.stride()}; view a "
            "contiguous tensor as one chunk with tensor.view(1, -1)"
        )


def padded(size: int, multiple: int = ROW_ALIGNMENT) -> int:
    """Round a number of bytes up to a multiple.

    Example:
        >>> padded(9), padded(16)
        (16, 16)
    """
    return -(-size // multiple) * multiple


def fraction_of(what: str, ratio: object) -> float:
    """Check that an option is a number in (0, 1]."""
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise ArgumentError(f"{what}: expected a number above 0 and at most 1, got {ratio!r}")
    return float(ratio)


def require_count(what: str, count: object, most: int | None = None) -> None:
    """Raise an ArgumentError unless a count is a positive integer, at most ``most`` if given."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= (most or count):
        expected = "a positive integer" if most is None else f"a whole number from 1 to {most}"
        raise ArgumentError(f"{what}: expected {expected}, got {count!r}")
