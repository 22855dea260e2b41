"""Checks of DistributedOptimizer's arguments, and the settings that must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from asyncddp.algorithms import ALGORITHMS, Algorithm
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.phases import PhaseConfig
from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.errors import ArgumentError


class WeightOverrideDescriptor:
    """Descriptor of DistributedOptimizer attributes that set averaging weights."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else getattr(owner._averager.overrides, self._field)

    def __set__(self, owner: Any, value: Any) -> None:
        setattr(owner._averager.overrides, self._field, value)


def checked_optimizer(optimizer: Any, wrapper: type) -> torch.optim.Optimizer:
    """Check that an argument is an optimizer not yet wrapped by ``wrapper``."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            "argument optimizer: expected a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}; the order is (optimizer, model)"
        )
    if isinstance(optimizer, wrapper):
        raise ArgumentError(
            "argument optimizer: got one that is distributed already; wrap the plain optimizer"
        )
    return optimizer


def checked_models(model: Any) -> list[torch.nn.Module]:
    """Return the argument's one or several modules as a list."""
    single = isinstance(model, torch.nn.Module) or not isinstance(model, Iterable)
    models = [model] if single else list(model)
    for one in models or [None]:
        if not isinstance(one, torch.nn.Module):
            raise ArgumentError(
                "argument model: expected a torch.nn.Module or a list of them, got "
                f"{type(one if models else model).__name__}"
            )
    return models


def checked_staleness(bound: Any, algorithm: Algorithm) -> int | None:
    """Check that max_staleness is an integer of at least 0, or None for the algorithm's default."""
    if bound is None:
        return algorithm.max_staleness
    steps = checked_integer("argument max_staleness", bound, 0, "None or a whole number")
    _require_windows("max_staleness", algorithm)
    return steps


def checked_scale_steps(given: Any, algorithm: Algorithm) -> bool:
    """Resolve scale_steps: True or False as given; None selects the algorithm's default."""
    if given is None:
        return bool(algorithm.scales_steps)
    if not isinstance(given, bool):
        raise ArgumentError(f"argument scale_steps: expected True, False or None, got {given!r}")
    if algorithm.scales_steps is None:
        fitting = [name for name in ALGORITHMS if ALGORITHMS[name].scales_steps is not None]
        raise ArgumentError(
            f"argument scale_steps: {algorithm.name} lets ranks of any speed count alike, or lets "
            f"them wait for each other; expected None, or {', '.join(fitting)} as algorithm"
        )
    return given


_LEAST_BUFFER = 0.25
"""MiB that the pieces of a few messages take."""


def checked_communication_buffer(megabytes: Any, averager: ModelAverager) -> int | None:
    """Convert the buffer size from MiB to bytes; keep None."""
    if megabytes is None:
        return None
    if not isinstance(megabytes, (int, float)) or not megabytes >= _LEAST_BUFFER:
        raise ArgumentError(
            f"argument communication_buffer_in_mb: expected None or a number of at least "
            f"{_LEAST_BUFFER}, got {megabytes!r}"
        )
    if not averager.splits_buckets:
        method = averager.algorithm.name
        raise ArgumentError(
            f"argument communication_buffer_in_mb: buckets of {method} travel whole here; expected "
            "None, or a method that averages parameters with neighbours, such as "
            "adapt_then_combine, without compression"
        )
    return int(min(megabytes, 2**40) * 2**20)


def checked_flag(name: str, given: Any) -> bool:
    """Check that an argument is True or False."""
    if not isinstance(given, bool):
        raise ArgumentError(f"argument {name}: expected True or False, got {given!r}")
    return given


def checked_prefix(prefix: Any, algorithm: Algorithm) -> str | None:
    """Check that window_prefix is None or a name, and that the algorithm is one-sided if named."""
    if prefix is None:
        return None
    if not isinstance(prefix, str) or not prefix:
        raise ArgumentError(f"argument window_prefix: expected a name or None, got {prefix!r}")
    _require_windows("window_prefix", algorithm)
    return prefix


def _require_windows(argument: str, algorithm: Algorithm) -> None:
    if not any(how.windowed for how in algorithm.how):
        fitting = [n for n in ALGORITHMS if any(how.windowed for how in ALGORITHMS[n].how)]
        why = "waits for nobody" if algorithm.how[0].one_sided else "waits for what it needs"
        raise ArgumentError(
            f"argument {argument}: {algorithm.name} has no windows, and {why}; "
            f"expected None, or one of {', '.join(fitting)} as algorithm"
        )


def describe_settings(config: PhaseConfig, update_in_backward: bool) -> list[str]:
    """List the settings that must be equal on all ranks, as sentences."""
    averager = config.averager
    return [
        f"algorithm {averager.algorithm.name!r}",
        f"communication {averager.communication.name!r}",
        f"num_steps_per_communication={config.passes_per_round}",
        f"bucket size {config.bucket_bytes} bytes",
        f"communication buffer {averager.communication_buffer or 'default'}",
        f"update_in_backward={update_in_backward}",
        f"wrapper {averager.label!r}",
        f"scale_steps={averager.windows.scales_steps}",
        f"compression={averager.compressor!r}",
        *(f"{name}={value!r}" for name, value in sorted(vars(averager.algorithm).items())),
    ]
