"""Checks DistributedOptimizer's arguments; defines its attributes that set averaging weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from asyncddp.algorithms import ALGORITHMS, Algorithm
from asyncddp.errors import ArgumentError


class WeightOverrideDescriptor:
    """Descriptor of a DistributedOptimizer attribute by which users set averaging weights."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else getattr(owner._averager.overrides, self._field)

    def __set__(self, owner: Any, value: Any) -> None:
        setattr(owner._averager.overrides, self._field, value)


def checked_optimizer(optimizer: Any, wrapper: type) -> torch.optim.Optimizer:
    """Check that an argument is an optimizer that is not wrapped yet by ``wrapper``.

    Raises:
        ArgumentError: It is no optimizer, or is wrapped.
    """
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


def checked_algorithm(algorithm: Any) -> Algorithm:
    """Create the algorithm of a name or class.

    Raises:
        UnknownNameError: No algorithm has that name.
        ArgumentError: It is neither a name nor an algorithm class.
    """
    if isinstance(algorithm, str):
        return ALGORITHMS[algorithm]()
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        return algorithm()
    raise ArgumentError(
        f"argument algorithm: expected one of {', '.join(ALGORITHMS)}, or a subclass of "
        f"asyncddp.algorithms.Algorithm, got {algorithm!r}"
    )


def checked_models(model: Any) -> list[torch.nn.Module]:
    """Return one or several modules as a list.

    Raises:
        ArgumentError: Something else was given.
    """
    single = isinstance(model, torch.nn.Module) or not isinstance(model, Iterable)
    models = [model] if single else list(model)
    for one in models or [None]:
        if not isinstance(one, torch.nn.Module):
            raise ArgumentError(
                "argument model: expected a torch.nn.Module or a list of them, got "
                f"{type(one if models else model).__name__}"
            )
    return models


def checked_steps(steps: Any) -> int:
    """Check that the number of steps per communication is an integer of at least 1.

    Raises:
        ArgumentError: It is something else.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(
            "argument num_steps_per_communication: expected a whole number of at least 1, got "
            f"{steps!r}"
        )
    return steps


def checked_staleness(bound: Any, algorithm: Algorithm) -> int | None:
    """Check that max_staleness is None or an integer of at least 0, and the algorithm one-sided.

    Raises:
        ArgumentError: It is something else, or all ranks wait for each other anyway.
    """
    if bound is None:
        return None
    if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
        raise ArgumentError(
            f"argument max_staleness: expected None or a whole number of at least 0, got {bound!r}"
        )
    _require_windows("max_staleness", algorithm)
    return bound


def checked_scale_steps(given: Any, algorithm: Algorithm) -> bool:
    """Resolve scale_steps: True or False as given, or the algorithm's default for None.

    Raises:
        ArgumentError: It is something else, or the method scales no steps.
    """
    if given is None:
        return algorithm.scales_steps
    if not isinstance(given, bool):
        raise ArgumentError(f"argument scale_steps: expected True, False or None, got {given!r}")
    if not algorithm.scales_steps:
        fitting = [name for name in ALGORITHMS if ALGORITHMS[name].scales_steps]
        raise ArgumentError(
            f"argument scale_steps: {algorithm.name} lets ranks of any speed count alike, or lets "
            f"them wait for each other; expected None, or {', '.join(fitting)} as algorithm"
        )
    return given


def checked_prefix(prefix: Any, algorithm: Algorithm) -> str | None:
    """Check that window_prefix is None or a name, and the algorithm one-sided.

    Raises:
        ArgumentError: It is something else, or the algorithm has no windows.
    """
    if prefix is None:
        return None
    if not isinstance(prefix, str) or not prefix:
        raise ArgumentError(f"argument window_prefix: expected a name or None, got {prefix!r}")
    _require_windows("window_prefix", algorithm)
    return prefix


def _require_windows(argument: str, algorithm: Algorithm) -> None:
    if not any(how.one_sided for how in algorithm.how):
        fitting = [n for n in ALGORITHMS if any(how.one_sided for how in ALGORITHMS[n].how)]
        raise ArgumentError(
            f"argument {argument}: {algorithm.name} has no windows, and waits for what it needs; "
            f"expected None, or one of {', '.join(fitting)} as algorithm"
        )
