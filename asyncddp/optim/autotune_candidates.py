"""Candidate settings for autotuning: those with equal results, and those that the user names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from asyncddp.algorithms import Algorithm, CommunicationTiming
from asyncddp.compression import Compressor
from asyncddp.compression.casts import Cast
from asyncddp.context import Context
from asyncddp.errors import ArgumentError
from asyncddp.optim.autotune import Autotune
from asyncddp.optim.method_settings import MethodSettings
from asyncddp.optim.successive_halving import trials_of
from asyncddp.tensors.buckets import partition

Setting: TypeAlias = dict[str, float | bool | str | None]
"""Settings that a search chooses, by the names of ``DistributedOptimizer``'s arguments."""

SEARCHED = ("bucket_size_in_mb", "communication", "update_in_backward", "compression")
_MEANS = ("allreduce", "hierarchical_allreduce")
"""Communications that form the same average, but for the order of the sum."""
_LEAST_MB = 1 / 16
_HALVINGS = 4


def setting_of(settings: MethodSettings) -> Setting:
    """Return the settings that a search may change."""
    given = {name: getattr(settings, name) for name in SEARCHED}
    return {k: repr(v) if isinstance(v, Compressor) else v for k, v in given.items()}


def candidates_of(
    settings: MethodSettings, method: Algorithm, context: Context, parameters: list[torch.Tensor]
) -> list[MethodSettings]:
    """Return the candidate settings; the first are the current settings.

    Candidates with equal message layouts appear once; candidates beyond ``max_trials`` are left
    out.

    Args:
        settings: Settings in use, with ``autotune``.
        method: The method in use, after a warm-up.
        context: The world.
        parameters: What is trained, in the optimizer's order.

    Raises:
        ArgumentError: The method cannot be tuned, or not in the way that was asked for.
    """
    autotune = settings.autotune or Autotune()
    _refuse_own_pace(method)
    if settings.communication is None and method.default_communication in _MEANS:
        settings = replace(settings, communication=method.default_communication)
    if method.when is CommunicationTiming.GRADIENT_READY:
        parameters = parameters[::-1]
    found: dict[object, MethodSettings] = {}
    for base in _with_compressors(settings, autotune):
        compressor = base.compressor_for(method)
        whole = _depends_on_buckets(method, compressor)
        for size in _bucket_sizes(base, autotune, parameters, whole=whole):
            layout = partition(parameters, max(1, int(size * 2**20)))
            for communication in _communications(base, autotune, context, whole=whole):
                for early in _overlaps(base, autotune, method):
                    key = (repr(layout), communication, early, repr(compressor))
                    one = replace(
                        base,
                        bucket_size_in_mb=size,
                        communication=communication,
                        update_in_backward=early,
                    )
                    found.setdefault(key, one)
    if len(found) == 1 and _depends_on_buckets(method, settings.compressor_for(method)):
        raise ArgumentError(
            f"argument autotune: the results of {method.name} with the compressor "
            f"{settings.compressor_for(method)!r} depend on its buckets, so that nothing can be "
            "tried unasked; expected autotune=False, or Autotune(bucket_sizes_in_mb=[...])"
        )
    return _thinned(list(found.values()), autotune.max_trials)


def _refuse_own_pace(method: Algorithm) -> None:
    by_clock = method.when is CommunicationTiming.INTERVAL
    if by_clock or any(pattern.one_sided for pattern in method.how):
        raise ArgumentError(
            f"argument autotune: {method.name} lets each rank go on at its own pace, but a search "
            "compares steps that all ranks make together; expected autotune=False, or a method "
            "whose ranks wait for each other, such as 'adapt_then_combine'"
        )


def _depends_on_buckets(method: Algorithm, compressor: Compressor | None) -> bool:
    """Return whether results may depend on the grouping of parameters into buckets."""
    return not (method.plain and (compressor is None or isinstance(compressor, Cast)))


def _with_compressors(settings: MethodSettings, autotune: Autotune) -> list[MethodSettings]:
    asked = [
        replace(settings, compression=one)
        if one is not None
        else replace(settings, compression=None, error_feedback=None, plain_compression=False)
        for one in autotune.compressors
    ]
    return [settings, *asked]


def _bucket_sizes(
    settings: MethodSettings,
    autotune: Autotune,
    parameters: Sequence[torch.Tensor],
    *,
    whole: bool,
) -> list[float]:
    in_use, given = settings.bucket_size_in_mb, autotune.bucket_sizes_in_mb
    if given is not None:
        return [in_use, *given]
    total = sum(one.numel() * one.element_size() for one in parameters) / 2**20
    if whole or not total:
        return [in_use]
    largest = 2.0 ** math.ceil(math.log2(total))
    sizes = [largest / 2**k for k in range(_HALVINGS + 1)]
    return [in_use, *(size for size in sizes if size >= _LEAST_MB)]


def _communications(
    settings: MethodSettings, autotune: Autotune, context: Context, *, whole: bool
) -> list[str | None]:
    in_use, wanted = settings.communication, autotune.hierarchical
    if in_use not in _MEANS:
        if wanted:
            raise ArgumentError(
                "argument autotune: hierarchical=True: only averages over all ranks are the same "
                f"between machines, got {in_use or 'a method that averages with neighbours'}; "
                "expected None or False"
            )
        return [in_use]
    several = 1 < context.machine_size < context.size
    if not several or wanted is False or (whole and not wanted):
        return [in_use]
    return [in_use, *(name for name in _MEANS if name != in_use)]


def _overlaps(settings: MethodSettings, autotune: Autotune, method: Algorithm) -> list[bool]:
    if not (settings.update_in_backward or autotune.update_in_backward):
        return [False]
    if method.when is not CommunicationTiming.AFTER_STEP:
        raise ArgumentError(
            f"argument autotune: update_in_backward=True: {method.name} averages "
            f"{method.when.value}; only a method that averages after_step, such as "
            "adapt_then_combine, can update in backward"
        )
    return [settings.update_in_backward, not settings.update_in_backward]


def _thinned(found: list[MethodSettings], max_trials: int) -> list[MethodSettings]:
    """Keep as many candidates as ``max_trials`` allows: the first, and evenly spaced others."""
    count = len(found)
    while trials_of(count) > max_trials:
        count -= 1
    if count == len(found):
        return found
    return [found[round(k * (len(found) - 1) / (count - 1))] for k in range(count)]
