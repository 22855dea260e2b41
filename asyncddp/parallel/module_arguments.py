"""Validation of DecentralizedDataParallel's arguments."""

from __future__ import annotations

from typing import Any

import torch

from asyncddp.algorithms.training_setup import checked_bucket_bytes, require_dense
from asyncddp.errors import ArgumentError
from asyncddp.parallel.optimizer_buckets import BucketUpdateConfig


def checked_model(model: Any, wrapper: type) -> torch.nn.Module:
    """Check that an argument is a module that is not wrapped yet by ``wrapper``."""
    if isinstance(model, wrapper) or not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            "argument model: expected a torch.nn.Module that is not distributed yet, got "
            f"{type(model).__name__}"
        )
    return model


def checked_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """List names and parameters of a model that require gradients."""
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


def checked_config(
    optim_fn: Any,
    lr_scheduler_fn: Any,
    scaler: Any,
    grad_clip_norm: Any,
    bucket_size_in_mb: Any,
    *,
    as_view: Any,
) -> BucketUpdateConfig:
    """Check how buckets are to be updated."""
    if not callable(optim_fn):
        raise _no_function("optim_fn", "an optimizer", optim_fn)
    if lr_scheduler_fn is not None and not callable(lr_scheduler_fn):
        raise _no_function("lr_scheduler_fn", "a scheduler, or None", lr_scheduler_fn)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentError(
            f"argument scaler: expected a torch.amp.GradScaler or None, got {scaler!r}"
        )
    return BucketUpdateConfig(
        optim_fn,
        lr_scheduler_fn,
        scaler,
        _checked_norm(grad_clip_norm),
        checked_bucket_bytes(bucket_size_in_mb),
        bool(as_view),
    )


def _no_function(argument: str, gives: str, value: Any) -> ArgumentError:
    return ArgumentError(
        f"argument {argument}: expected a function that gives {gives}, got {value!r}"
    )


def _checked_norm(value: Any) -> float:
    """Check that an argument is a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ArgumentError(
            "argument grad_clip_norm: expected the largest norm of all gradients together, or 0 "
            f"to clip nothing, got {value!r}"
        )
    return float(value)
