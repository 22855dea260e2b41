"""Registration of a fast path for a neighbour average that repeats: same name, dtype and shape."""

from __future__ import annotations

import torch

from asyncddp.context import Context
from asyncddp.engine.persistent_channels import PersistentChannel
from asyncddp.ops.fast_path import FastPath
from asyncddp.ops.validation import signature_of


def register_fast_path(
    context: Context, verb: str, given: str | None, name: str, tensor: torch.Tensor
) -> None:
    """Register a fast path for tensors like this one, if they have a persistent channel.

    Args:
        context: The world.
        verb: The verb.
        given: The name that the user has given, or None.
        name: The name under which neighbours match it.
        tensor: What was averaged.
    """
    fast_paths = context.engine.fast_paths
    key = given, tensor.dtype, tensor.shape
    if key not in fast_paths and context.transport.shared_memory_group is not None:
        channel = context.engine.matcher.channels.get(name, signature_of(verb, tensor))
        if channel is not None and tensor.is_cpu:
            fast_paths[key] = _make_fast_path(context, verb, name, channel)


def _make_fast_path(context: Context, verb: str, name: str, channel: PersistentChannel) -> FastPath:
    """Make a fast path; it is traced if there is a timeline."""
    if context.tracer is None:
        return FastPath(context, verb, name, channel)
    from asyncddp.ops.traced_fast_path import TracedFastPath

    return TracedFastPath(context.tracer, context, verb, name, channel)
