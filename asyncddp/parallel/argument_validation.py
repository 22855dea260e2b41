"""Validation of DecentralizedDataParallel's arguments."""

from __future__ import annotations

from typing import Any

import torch

from asyncddp.algorithms.phases.optimizer_buckets import BucketUpdateConfig
from asyncddp.algorithms.wrapper_setup import checked_bucket_bytes, require_trainable
from asyncddp.context import Context
from asyncddp.errors import ArgumentError
from asyncddp.tensors.fsdp_params import register
from asyncddp.tensors.local_parts import local, reshard


def checked_model(model: Any, wrapper: type) -> torch.nn.Module:
    """Check that an argument is a module that ``wrapper`` does not wrap yet, and return it."""
    if isinstance(model, wrapper) or not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            "argument model: expected a torch.nn.Module that is not distributed yet, got "
            f"{type(model).__name__}"
        )
    return model


def checked_parameters(
    context: Context, model: torch.nn.Module
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the names and parameters that require gradients; check that a model has some."""
    named = []
    reshard([model])
    register([model])
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ArgumentError(
                f"argument model: parameter {name} has no shape yet; make a forward pass first"
            )
        if parameter.requires_grad and local(parameter).numel():
            named.append((name, parameter))
        require_trainable(context, name, parameter)
    if not named:
        raise ArgumentError(
            "argument model: expected one with parameters to train, got "
            f"{type(model).__name__} without any that requires a gradient"
        )
    return named


def checked_config(
    optim_fn: Any, lr_scheduler_fn: Any, scaler: Any, clip: Any, megabytes: Any, as_view: Any
) -> BucketUpdateConfig:
    """Check the wrapper's arguments for buckets and optimizers; return them as a config."""
    if not callable(optim_fn):
        raise _unexpected("optim_fn", "a function that gives an optimizer", optim_fn)
    if lr_scheduler_fn is not None and not callable(lr_scheduler_fn):
        what = "a function that gives a scheduler, or None"
        raise _unexpected("lr_scheduler_fn", what, lr_scheduler_fn)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise _unexpected("scaler", "a torch.amp.GradScaler or None", scaler)
    if isinstance(clip, bool) or not isinstance(clip, (int, float)) or not clip >= 0:
        what = "the largest norm of all gradients together, or 0 to clip nothing"
        raise _unexpected("grad_clip_norm", what, clip)
    size = checked_bucket_bytes(megabytes)
    return BucketUpdateConfig(optim_fn, lr_scheduler_fn, scaler, float(clip), size, bool(as_view))


def _unexpected(argument: str, expected: str, value: Any) -> ArgumentError:
    return ArgumentError(f"argument {argument}: expected {expected}, got {value!r}")
