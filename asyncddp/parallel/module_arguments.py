"""Validation of DecentralizedDataParallel's arguments."""

from __future__ import annotations

from typing import Any

import torch

from asyncddp.algorithms.training_setup import require_dense
from asyncddp.errors import ArgumentError


def checked_model(model: Any, wrapper: type) -> torch.nn.Module:
    """Check that an argument is a module that is not wrapped yet by ``wrapper``.

    Raises:
        ArgumentError: It is no module, or is wrapped.
    """
    if isinstance(model, wrapper) or not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            "argument model: expected a torch.nn.Module that is not distributed yet, got "
            f"{type(model).__name__}"
        )
    return model


def checked_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """List names and parameters of a model that require gradients.

    Raises:
        ArgumentError: There are none, or one is sparse or has no memory.
    """
    named = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ArgumentError(
                f"argument model: parameter {name} has no shape yet; make a forward pass first"
            )
        if parameter.requires_grad and parameter.numel():
            named.append((name, parameter))
        require_dense(name, parameter)
    if not named:
        raise ArgumentError(
            "argument model: expected one with parameters to train, got "
            f"{type(model).__name__} without any that requires a gradient"
        )
    return named


def checked_function(value: Any, argument: str, gives: str, *, optional: bool = False) -> None:
    """Check that an argument is callable.

    Raises:
        ArgumentError: It is not.
    """
    if not (callable(value) or (optional and value is None)):
        raise ArgumentError(
            f"argument {argument}: expected a function that gives {gives}, got {value!r}"
        )


def checked_scaler(scaler: Any) -> None:
    """Check that an argument is a GradScaler or None.

    Raises:
        ArgumentError: It is neither.
    """
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentError(
            f"argument scaler: expected a torch.amp.GradScaler or None, got {scaler!r}"
        )


def checked_norm(value: Any) -> float:
    """Check that an argument is a number of at least 0.

    Raises:
        ArgumentError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ArgumentError(
            "argument grad_clip_norm: expected the largest norm of all gradients together, or 0 "
            f"to clip nothing, got {value!r}"
        )
    return float(value)
