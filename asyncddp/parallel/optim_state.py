"""The state of all blocks' optimizers and schedulers, by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from asyncddp.errors import ArgumentError
from asyncddp.parallel.blocks import Block

__all__ = ["check_state", "restore", "state_of"]

_KEYS = ("step", "state", "options", "schedulers")


def state_of(blocks: Sequence[Block], step: int) -> dict[str, Any]:
    """What a run needs to go on, whatever its buckets.

    Args:
        blocks: The blocks.
        step: Steps completed.

    Returns:
        ``step``, and by the parameter's name: ``state`` of its optimizer, ``options`` of its group,
        state of its scheduler in ``schedulers``.
    """
    found: dict[str, Any] = {"step": step, "state": {}, "options": {}, "schedulers": {}}
    for block in blocks:
        names = _names(block)
        for group in block.optimizer.param_groups:
            options = {key: value for key, value in group.items() if not key.startswith("param")}
            found["options"].update({names[id(one)]: options for one in group["params"]})
        for parameter, state in block.optimizer.state.items():
            found["state"][names[id(parameter)]] = dict(state)
        if block.scheduler is not None:
            found["schedulers"].update(dict.fromkeys(block.names, block.scheduler.state_dict()))
    return found


def check_state(state: Any, names: Sequence[str]) -> None:
    """Insist on what :func:`state_of` has given for parameters of these names.

    Raises:
        ArgumentError: It is something else.
    """
    if not isinstance(state, Mapping) or any(key not in state for key in _KEYS):
        raise ArgumentError(
            "load_optim_state_dict: argument state_dict: expected what optim_state_dict() of a "
            f"DecentralizedDataParallel has given, got {_seen(state)}"
        )
    known = {*state["options"], *state["schedulers"]}
    strangers = sorted(known - set(names))
    if strangers:
        raise ArgumentError(
            "load_optim_state_dict: argument state_dict: it has parameter "
            f"{strangers[0]}, which the model has not, or does not train"
        )


def _seen(state: Any) -> str:
    kind = type(state).__name__
    return f"{kind} with {sorted(map(str, state))}" if isinstance(state, Mapping) else kind


def restore(block: Block, saved: Mapping[str, Any]) -> None:
    """Give a block's optimizer and scheduler the state of their parameters.

    Args:
        block: The block.
        saved: What :func:`state_of` has given.
    """
    names, optimizer = _names(block), block.optimizer
    content = optimizer.state_dict()
    state: dict[int, Any] = {}
    for group, packed in zip(optimizer.param_groups, content["param_groups"], strict=True):
        for parameter, place in zip(group["params"], packed["params"], strict=True):
            name = names[id(parameter)]
            packed.update(deepcopy(saved["options"].get(name, {})))
            if name in saved["state"]:
                state[place] = deepcopy(saved["state"][name])
    optimizer.load_state_dict({"state": state, "param_groups": content["param_groups"]})
    past = saved["schedulers"].get(block.names[0])
    if block.scheduler is not None and past is not None:
        block.scheduler.load_state_dict(_fitted(deepcopy(past), optimizer))


def _names(block: Block) -> dict[int, str]:
    return {id(one): name for one, name in zip(block.parameters, block.names, strict=True)}


def _fitted(state: Any, optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler's state with learning rates for each group of another bucket's optimizer."""
    if isinstance(state, list):
        return [_fitted(entry, optimizer) for entry in state]
    if not isinstance(state, dict):
        return state
    state = {key: _fitted(value, optimizer) for key, value in state.items()}
    for key, option in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        if key in state:
            state[key] = [group[option] for group in optimizer.param_groups]
    return state
