"""Check that ``torch.load(weights_only=True)`` will read what is about to be saved."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any

import torch

from asyncddp.errors import ArgumentError

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, dict, OrderedDict)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def check_loadable(where: str, value: Any) -> None:
    """Raise an error that names the entry that ``torch.load(weights_only=True)`` would not read.

    Args:
        where: What the value is in messages, such as ``"extra"``.
        value: Tensors, numbers, strings, bytes, None, lists, tuples and dicts of them, and what
            users have allowed by ``torch.serialization.add_safe_globals``.

    Example:
        >>> check_loadable("extra", {"loss": [0.5]})
        >>> check_loadable("extra", {"done": {"when": range(3)}})
        Traceback (most recent call last):
        asyncddp.errors.ArgumentError: argument extra['done']['when']: expected tensors, ...
    """
    _check(where, value, set())


def _check(where: str, value: Any, seen: set[int]) -> None:
    if type(value) in _PLAIN or type(value) in _TENSORS or id(value) in seen:
        return
    if type(value) not in _CONTAINERS:
        _round_trip(where, value)
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, one in value.items():
            _check(f"{where}: key {key!r}", key, seen)
            _check(f"{where}[{key!r}]", one, seen)
    else:
        for place, one in enumerate(value):
            _check(f"{where}[{place}]", one, seen)


def _round_trip(where: str, value: Any) -> None:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise ArgumentError(
            f"argument {where}: expected tensors, numbers, strings, bytes, None, and lists, tuples "
            "and dicts of them, which torch.load(weights_only=True) reads, got "
            f"{kind}; give its state_dict(), .item(), .tolist() or torch.as_tensor() of it, or "
            "allow its class by torch.serialization.add_safe_globals"
        ) from error
