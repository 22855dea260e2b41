"""Helpers to set up optimizer and model wrappers: argument checks, comparison between ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.context import Context
from asyncddp.context.mesh_context import inner_context, ranks_of_replica, world_of
from asyncddp.errors import ArgumentError
from asyncddp.ops.settings_agreement import require_equal_on_all_ranks
from asyncddp.tensors.local_parts import is_distributed, shard
from asyncddp.tensors.ordinary import require_ordinary
from asyncddp.topology import as_schedule, describe
from asyncddp.topology.builders import topology_for

_CLAIM = "{} needs the same model and settings on all ranks"
_ROUNDS = 8  # rounds of a time-varying topology that are compared in check mode


def next_label(context: Context, wrapper: str) -> str:
    """Return a label for the next wrapper; ranks must create wrappers in the same order."""
    number = context.extensions[wrapper] = context.extensions.get(wrapper, -1) + 1
    return f"{wrapper}{number}"


def checked_bucket_bytes(megabytes: Any) -> int:
    """Check a bucket size in MiB, and convert it to bytes."""
    if not isinstance(megabytes, (int, float)) or not megabytes > 0:
        raise ArgumentError(
            f"argument bucket_size_in_mb: expected a number above 0, got {megabytes!r}"
        )
    return max(1, int(megabytes * 2**20))


def checked_share(name: str, value: Any, *, closed: bool = False) -> float:
    """Check that a coefficient is a number in [0, 1), or in [0, 1] if ``closed``."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (0.0 <= value < 1.0 or (closed and value == 1.0)):
        upper = "to 1" if closed else "to below 1"
        raise ArgumentError(f"{name}: expected a number from 0 {upper}, got {value!r}")
    return float(value)


def checked_positive(name: str, value: Any, *, or_zero: bool = False) -> float:
    """Check that a coefficient is finite and positive, or zero if ``or_zero``."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (0.0 < value < math.inf or (or_zero and value == 0)):
        least = "of at least 0" if or_zero else "above 0"
        raise ArgumentError(f"{name}: expected a number {least}, got {value!r}")
    return float(value)


def checked_integer(
    argument: str, value: Any, least: int | None = None, wanted: str = "a whole number"
) -> int:
    """Check that an argument is an integer, of at least ``least`` if given, and return it."""
    is_integer = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_integer or (least is not None and value < least):
        limit = "" if least is None else f" of at least {least}"
        raise ArgumentError(f"{argument}: expected {wanted}{limit}, got {value!r}")
    return int(value)


def checked_choice(argument: str, value: Any, known: Sequence[str]) -> str:
    """Check that an argument is one of the known names, and return it."""
    if value not in known:
        listed = ", ".join(map(repr, known))
        raise ArgumentError(f"{argument}: expected one of {listed}, got {value!r}")
    return str(value)


def checked_interval(steps: Any) -> int:
    """Check that the argument communication_interval is a number of steps."""
    return checked_integer("argument communication_interval", steps, 1)


def require_trainable(context: Context, name: str, parameter: torch.Tensor) -> None:
    """Raise an error unless a parameter, or this rank's part of it, is dense and in memory.

    Parts are averaged in the context of a column of replicas, and nowhere else.
    """
    if is_distributed(parameter) and inner_context(context) is None:
        raise ArgumentError(
            f"argument model: parameter {name} is a DTensor, of which this rank has a part; give "
            "mesh=mesh['replica'], the dimension of the mesh along which it is not sharded"
        )
    if is_distributed(parameter):
        _require_within(ranks_of_replica(context), name, parameter)
    require_dense(name, shard(parameter))


def _require_within(ranks: frozenset[int], name: str, parameter: torch.Tensor) -> None:
    """Raise an error if a parameter is sharded over ranks of other replicas."""
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    found = {*mesh.mesh.flatten().tolist()}
    if not found <= ranks:
        raise ArgumentError(
            f"argument mesh: parameter {name} is sharded over the ranks {sorted(found)}, but this "
            f"replica has {sorted(ranks)}; shard the model over the other dimensions alone, as by "
            "fully_shard(model, mesh=mesh['shard'])"
        )


def require_dense(name: str, parameter: torch.Tensor) -> None:
    """Raise an error unless a parameter is a dense tensor in memory."""
    require_ordinary("argument model", parameter, f"parameter {name}")
    if parameter.layout != torch.strided or parameter.is_meta:
        what = "on the meta device" if parameter.is_meta else str(parameter.layout)
        raise ArgumentError(
            f"argument model: parameter {name} is {what}; expected a dense tensor in memory"
        )


def require_equal_setup(
    averager: ModelAverager,
    wrapper: str,
    settings: Sequence[str],
    named: Iterable[tuple[str, torch.Tensor]],
    sent: Mapping[str, torch.Tensor],
) -> None:
    """Raise an error on all ranks unless settings and topology weights agree; collective.

    Calls :func:`require_equal_settings`, and in check mode :func:`check_weights`.
    """
    require_equal_settings(averager.context, wrapper, settings, named, sent)
    check_weights(averager, wrapper)


def require_equal_settings(
    context: Context,
    wrapper: str,
    settings: Sequence[str],
    named: Iterable[tuple[str, torch.Tensor]],
    sent: Mapping[str, torch.Tensor],
) -> None:
    """Raise an error on all ranks unless all have equal settings and parameters; collective.

    Shapes and dtypes of the tensors that rank 0 broadcasts, ``sent``, must be equal, too.
    """
    facts = [
        f"parameter {name} of shape {tuple(one.shape)}, strides {one.stride()}, {one.dtype}"
        for name, one in named
    ]
    facts += [
        f"{name} of shape {tuple(one.shape)}, {one.dtype}, which broadcast=False leaves alone"
        for name, one in sent.items()
    ]
    require_equal_on_all_ranks(context, _CLAIM.format(wrapper), [*settings, *facts])


def require_equal_replicas(context: Context, settings: str, topology: Any) -> None:
    """Raise an error on all ranks unless all columns of sharded replicas agree; collective.

    They average with the same weights, though no message goes from one to another.
    """
    if inner_context(context) is not None:
        given = None if topology is None else describe(topology_for(topology, context.size))
        facts = [settings, f"topology {given}", f"{context.size} replicas"]
        require_equal_on_all_ranks(world_of(context), _CLAIM.format("argument mesh"), facts)


def check_weights(averager: ModelAverager, wrapper: str) -> None:
    """Raise an error on all ranks unless their topologies' weights agree, in check mode."""
    if averager.context.config.check:
        facts = [_describe_weights(averager)]
        require_equal_on_all_ranks(averager.context, _CLAIM.format(wrapper), facts)


def _describe_weights(averager: ModelAverager) -> str:
    """Format the topology in use, with a hash of its weights in the first rounds."""
    given = averager.topology_in_use(averager.topology)
    if given is None:
        return "no topology"
    schedule = as_schedule(given)
    rounds = range(_ROUNDS if schedule.period is None else min(_ROUNDS, schedule.period))
    graphs = [schedule.graph(k) for k in rounds]
    weights: list[Any] = [sorted(graph.edges(data="weight")) for graph in graphs]
    digest = hashlib.sha256(repr(weights).encode()).hexdigest()[:12]
    return f"topology {schedule.name} with the weights {digest}"
