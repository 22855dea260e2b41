"""Saving and loading the state of all buckets' optimizers, keyed by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from asyncddp.algorithms.phases.optimizer_buckets import OptimizedParameters
from asyncddp.errors import ArgumentError

_KEYS = ("step", "state", "options", "schedulers")


def collect_state(buckets: Sequence[OptimizedParameters], step: int) -> dict[str, Any]:
    """Return the step and the state of all optimizers and schedulers, keyed by parameter name."""
    found: dict[str, Any] = {"step": step, "state": {}, "options": {}, "schedulers": {}}
    for bucket in buckets:
        names = _names(bucket)
        for group in bucket.optimizer.param_groups:
            options = {key: value for key, value in group.items() if not key.startswith("param")}
            found["options"].update({names[id(one)]: options for one in group["params"]})
        for parameter, state in bucket.optimizer.state.items():
            found["state"][names[id(parameter)]] = dict(state)
        if bucket.scheduler is not None:
            found["schedulers"].update(dict.fromkeys(bucket.names, bucket.scheduler.state_dict()))
    return found


def check_state(state: Any, names: Sequence[str]) -> None:
    """Check that a state comes from :func:`collect_state` and names only these parameters."""
    is_mapping = isinstance(state, Mapping)
    if not is_mapping or any(key not in state for key in _KEYS):
        content = f" with {sorted(map(str, state))}" if is_mapping else ""
        raise ArgumentError(
            "load_optim_state_dict: argument state_dict: expected what optim_state_dict() of a "
            f"DecentralizedDataParallel has given, got {type(state).__name__}{content}"
        )
    known = {*state["options"], *state["schedulers"]}
    unknown = sorted(known - set(names))
    if unknown:
        raise ArgumentError(
            "load_optim_state_dict: argument state_dict: it has parameter "
            f"{unknown[0]}, which the model has not, or does not train"
        )


def restore_state(bucket: OptimizedParameters, saved: Mapping[str, Any]) -> None:
    """Load the saved state of a bucket's parameters into its optimizer and scheduler."""
    names, optimizer = _names(bucket), bucket.optimizer
    content = optimizer.state_dict()
    state: dict[int, Any] = {}
    for group, packed in zip(optimizer.param_groups, content["param_groups"], strict=True):
        for parameter, position in zip(group["params"], packed["params"], strict=True):
            name = names[id(parameter)]
            packed.update(deepcopy(saved["options"].get(name, {})))
            if name in saved["state"]:
                state[position] = deepcopy(saved["state"][name])
    optimizer.load_state_dict({"state": state, "param_groups": content["param_groups"]})
    past = saved["schedulers"].get(bucket.names[0])
    if bucket.scheduler is not None and past is not None:
        bucket.scheduler.load_state_dict(_adapt_scheduler_state(deepcopy(past), optimizer))


def _names(bucket: OptimizedParameters) -> dict[int, str]:
    return {id(one): name for one, name in zip(bucket.parameters, bucket.names, strict=True)}


def _adapt_scheduler_state(state: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Set the learning rates in a scheduler's state to those of an optimizer's groups."""
    if isinstance(state, list):
        return [_adapt_scheduler_state(entry, optimizer) for entry in state]
    if not isinstance(state, dict):
        return state
    state = {key: _adapt_scheduler_state(value, optimizer) for key, value in state.items()}
    for key, option in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        if key in state:
            state[key] = [group[option] for group in optimizer.param_groups]
    return state
