"""Enums of Bagua's old API: algorithms, bucket contents, reductions and compressors."""

from __future__ import annotations

from enum import Enum
from typing import Any

from typing_extensions import Self

from asyncddp.errors import UnknownNameError
from asyncddp.registry import nearest

__all__ = ["BucketType", "Compressor", "DistributedAlgorithm", "ReduceOp"]


class DistributedAlgorithm(Enum):
    """Enum of the algorithms of a training stage; the plain value may be passed instead.

    Example:
        >>> DistributedAlgorithm.from_str("decentralize")
        <DistributedAlgorithm.Decentralize: 'decentralize'>
    """

    GradientAllReduce = "allreduce"
    """Averages gradients over all ranks."""
    ScatterGatherAllReduce = "sg-allreduce"
    """Averages gradients over all ranks, of which each averages one part and sends it to all."""
    Decentralize = "decentralize"
    """Averages parameters."""
    QuantizeAllReduce = "quantize"
    """``ScatterGatherAllReduce`` in 8 bits."""

    @classmethod
    def from_str(cls, value: Any) -> Self:
        """Return the algorithm of a value; return an algorithm unchanged.

        Raises:
            UnknownNameError: There is no such algorithm.
        """
        if isinstance(value, cls):
            return value
        known = {one.value: one for one in cls}
        if value not in known:
            raise UnknownNameError(
                f"argument distributed_algorithm: unknown algorithm {value!r}; known are: "
                f"{', '.join(known)}.{nearest(str(value), known)}"
            )
        return known[value]


class BucketType(Enum):
    """Contents of buckets: gradients, parameters' data, or the parameters themselves."""

    Gradient = "gradient"
    Weight = "weight"
    Param = "param"


class ReduceOp(Enum):
    """Reduction of gradients: their sum or their average."""

    Sum = "sum"
    Average = "average"


class Compressor(Enum):
    """Compressor of messages; its value is a name of ``asyncddp.compression``."""

    NoneCompressor = None
    Uint8Compressor = "minmax_uint8"
