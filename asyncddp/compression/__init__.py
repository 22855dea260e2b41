"""Compressors, which encode tensors into fewer bytes: a registry, and one file for each of them.

Here belong the encoding of a tensor's rows as bytes, their decoding, and error feedback. ``ops``
and ``windows`` call compressors, users choose one by its name. Nothing here communicates; the same
input and seed give the same bytes on each rank.
"""

from __future__ import annotations

from asyncddp.compression.compressor import Compressor, CompressorState
from asyncddp.compression.error_feedback import ErrorFeedback
from asyncddp.errors import ArgumentError
from asyncddp.registry import PluginRegistry

__all__ = ["COMPRESSORS", "Compressor", "CompressorState", "ErrorFeedback", "compressor_for"]

COMPRESSORS: PluginRegistry[type[Compressor]] = PluginRegistry(
    "compressor",
    {
        "bf16": "asyncddp.compression.bf16:BF16",
        "dct_top_k": "asyncddp.compression.dct_top_k:DCTTopK",
        "fp16": "asyncddp.compression.fp16:FP16",
        "lloyd_max_int2": "asyncddp.compression.lloyd_max_int2:LloydMaxInt2",
        "minmax_uint8": "asyncddp.compression.minmax_uint8:MinMaxUInt8",
        "power_sgd": "asyncddp.compression.power_sgd:PowerSGD",
        "qsgd_int4": "asyncddp.compression.qsgd:QSGDInt4",
        "qsgd_int8": "asyncddp.compression.qsgd:QSGDInt8",
        "random_k": "asyncddp.compression.random_k:RandomK",
        "sign": "asyncddp.compression.sign:Sign",
        "top_k": "asyncddp.compression.top_k:TopK",
        "top_k_int2": "asyncddp.compression.top_k_int2:TopKInt2",
    },
    group="asyncddp.compressors",
)


def compressor_for(caller: str, given: str | Compressor) -> Compressor:
    """Look up a compressor by its name, with default options; return a given compressor unchanged.

    Raises:
        UnknownNameError: No compressor has the name.
        ArgumentError: It is something else.
    """
    if isinstance(given, Compressor):
        return given
    if isinstance(given, str):
        return COMPRESSORS[given]()
    raise ArgumentError(
        f"{caller}: argument compression: expected None, a compressor such as "
        f"asyncddp.compression.COMPRESSORS['minmax_uint8'](), or one of {', '.join(COMPRESSORS)}; "
        f"got {given!r}"
    )
