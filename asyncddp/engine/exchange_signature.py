"""Signature of an exchange: operation, dtype, shape and device on which both sides must agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncddp.engine.messages import TensorMessage


@dataclass(frozen=True)
class ExchangeSignature:
    """Signature that both sides of an exchange must share: operation, dtype, shape, device type.

    Attributes:
        verb: The verb's name.
        dtype: Short name of the dtype.
        shape: The shape; None in place of a size that may differ between ranks.
        device: The kind of device.
    """

    verb: str
    dtype: str
    shape: tuple[int | None, ...]
    device: str = "cpu"

    def difference(self, message: TensorMessage) -> str | None:
        """Say how a message differs from it, as "expected …, got …"; None if it fits."""
        if message.verb != self.verb:
            return f"expected verb {self.verb}, got {message.verb}"
        if message.dtype != self.dtype:
            return f"expected dtype {self.dtype}, got {message.dtype}"
        if message.device != self.device:
            return f"expected a tensor on {self.device}, got one on {message.device}"
        fits = len(message.shape) == len(self.shape) and all(
            want is None or want == have
            for want, have in zip(self.shape, message.shape, strict=True)
        )
        if not fits:
            return f"expected shape {_format_shape(self.shape)}, got {_format_shape(message.shape)}"
        return None


def _format_shape(shape: Iterable[int | None]) -> str:
    """Write a shape as Python does, ``(3,)``, with ``any`` where every size fits."""
    sizes = ["any" if size is None else str(size) for size in shape]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"
