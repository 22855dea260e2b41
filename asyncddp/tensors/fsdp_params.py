"""Access to private attributes of FSDP2 and DTensor, to share memory with their shards.

FSDP2 gathers a parameter from a flat, padded tensor that it keeps beside the DTensor which the
optimizer sees. To average in place, both have to lie in a bucket. Where a torch has other names,
shards stay where FSDP2 has put them, and are copied to buckets and back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_LOCAL, _FLAT, _SIZE = "_local_tensor", "_sharded_param_data", "padded_sharded_param_size"
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_GROUPS = "_fsdp_param_groups", "_fsdp_param_group"
_holders: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Weak references to FSDP2's own records of parameters; None where its names are not known."""


def shard_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the local tensor of a DTensor; None for other tensors."""
    kind = type(tensor)
    if kind in _PLAIN or not hasattr(kind, _LOCAL):  # hasattr takes longer where it finds nothing
        return None
    found: torch.Tensor = getattr(tensor, _LOCAL)
    return found


def register(modules: Iterable[torch.nn.Module]) -> None:
    """Find what FSDP2 keeps of the parameters of modules."""
    for module in fsdp_modules(modules):
        for parameter in module.parameters():
            if shard_of(parameter) is not None:
                _holders.setdefault(parameter, None)  # type: ignore[no-untyped-call]
        for holder in _params_of(module):
            _holders[holder.sharded_param] = ref(holder)


def fsdp_modules(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yield the modules to which ``fully_shard`` was applied, outer ones first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is not None:
        for one in modules:
            yield from (module for module in one.modules() if isinstance(module, kind))


def _params_of(module: Any) -> Iterator[Any]:
    """Yield what FSDP2 keeps of the parameters of one of its modules, as far as it is known."""
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    groups = next((getattr(state, name) for name in _GROUPS if hasattr(state, name)), None) or ()
    for group in groups if isinstance(groups, list) else [groups]:
        for holder in getattr(group, "fsdp_params", ()):
            if all(hasattr(holder, name) for name in (_FLAT, _SIZE, "sharded_param")):
                yield holder


def padded_shard(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's shard with the padding that FSDP2 keeps; None if there is none."""
    holder = _holder_of(parameter)
    if holder is None:
        return None
    flat: torch.Tensor = getattr(holder, _FLAT)
    return flat.view(getattr(holder, _SIZE))


def stays_in_place(parameter: torch.Tensor) -> bool:
    """Return whether FSDP2 keeps a parameter by names that are not known, so that it stays."""
    return parameter in _holders and _holder_of(parameter) is None


def move_shard(parameter: torch.Tensor, padded: torch.Tensor, used: torch.Tensor) -> None:
    """Let a DTensor, and FSDP2 if it keeps it, hold its values in other memory.

    Args:
        parameter: The DTensor.
        padded: The memory, in the shape of :func:`padded_shard`, or of the local tensor.
        used: Its part without padding.
    """
    holder = _holder_of(parameter)
    if holder is not None:
        setattr(holder, _FLAT, padded.view(-1))
    setattr(parameter, _LOCAL, used)


def _holder_of(parameter: torch.Tensor) -> Any:
    found: ref[Any] | None = _holders.get(parameter)  # type: ignore[no-untyped-call]
    holder = None if found is None else found()
    return holder if holder is not None and holder.sharded_param is parameter else None
