"""Functions that make the blocking, non-blocking and in-place variants of BlueFog's operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from asyncddp.engine import Handle
from asyncddp.integrations.bluefog.bluefog_state import HandleTable, active_state, current_state
from asyncddp.integrations.bluefog.error_translation import translate_errors_of
from asyncddp.ops.variants import set_metadata

__all__ = ["poll", "synchronize", "wait"]

P = ParamSpec("P")
R = TypeVar("R")
Options = dict[str, Any]


class _OperationMapping(NamedTuple):
    """Mapping of one of BlueFog's operations to asyncddp's operation and arguments.

    A prefix is put before names, so that different verbs may share one, as in BlueFog.
    """

    run: Callable[..., torch.Tensor]
    start: Callable[..., Handle[torch.Tensor]]
    prefix: str
    plan: Callable[..., Options]

    def prepare(self, args: Any, kwargs: Any) -> tuple[HandleTable[Handle[Any]], Options]:
        """Return the table of handles, and the arguments with a prefixed name that is free."""
        handles, options = active_state().collectives, self.plan(*args, **kwargs)
        if options["name"] is not None:
            options["name"] = f"{self.prefix}.{options['name']}"
        handles.require_free_name(options["name"])
        return handles, options


def unless_suspended(verb: Callable[P, R]) -> Callable[P, R]:
    """Make an operation raise BlueFog's errors, and an error while communication is suspended."""

    @functools.wraps(verb)
    def variant(*args: P.args, **kwargs: P.kwargs) -> R:
        active_state()
        return verb(*args, **kwargs)

    return variant


def blocking(
    run: Callable[..., torch.Tensor], start: Callable[..., Handle[torch.Tensor]]
) -> Callable[[Callable[P, Options]], Callable[P, torch.Tensor]]:
    """Make a blocking verb from a function that returns the arguments of asyncddp's verb."""
    return lambda plan: _make_blocking(
        _OperationMapping(run, start, plan.__name__.replace("_", "."), plan)
    )


def _make_blocking(verb: _OperationMapping) -> Callable[..., torch.Tensor]:
    @functools.wraps(verb.plan)
    def variant(*args: Any, **kwargs: Any) -> torch.Tensor:
        _, options = verb.prepare(args, kwargs)
        return verb.run(options.pop("tensor"), **options)

    variant.verb = verb  # type: ignore[attr-defined]  # of which the other variants are made
    return set_metadata(variant, verb.plan.__name__, verb.plan.__doc__, torch.Tensor)


def nonblocking(variant: Callable[P, torch.Tensor]) -> Callable[P, int]:
    """Make the non-blocking variant of a blocking verb."""
    verb: _OperationMapping = variant.verb  # type: ignore[attr-defined]

    @functools.wraps(verb.plan)
    def start(*args: P.args, **kwargs: P.kwargs) -> int:
        handles, options = verb.prepare(args, kwargs)
        return handles.add(verb.start(options.pop("tensor"), **options), options["name"])

    name = variant.__name__
    own_name = f"{name.removesuffix('_')}_nonblocking{'_' * name.endswith('_')}"
    doc = f"Start :func:`{name}` and give a handle for :func:`synchronize`."
    return set_metadata(start, own_name, doc, int)


def in_place(variant: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """Make the in-place variant of a blocking verb: its result overwrites the tensor."""
    verb: _OperationMapping = variant.verb  # type: ignore[attr-defined]

    @functools.wraps(verb.plan)
    def plan(*args: P.args, **kwargs: P.kwargs) -> Options:
        options = verb.plan(*args, **kwargs)
        return {**options, "out": options["tensor"]}

    name = variant.__name__
    plan.__name__ = f"{name}_"
    plan.__doc__ = f":func:`{name}` whose result replaces the tensor, which is returned."
    return _make_blocking(verb._replace(plan=plan))


def poll(handle: int) -> bool:
    """Return True if a verb has ended or failed; never wait."""
    return current_state().collectives.find("poll", handle).poll()


def synchronize(handle: int) -> torch.Tensor:
    """Wait for the result of a verb, and remove its handle, even if the verb has failed."""
    result: torch.Tensor = current_state().collectives.pop("synchronize", handle).wait()
    return result


wait = synchronize


translate_errors_of(globals(), __all__)
