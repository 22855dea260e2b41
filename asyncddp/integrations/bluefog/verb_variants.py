"""Makes blocking and non-blocking variants of BlueFog's operations, with integer handles."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch

from asyncddp.engine import Handle
from asyncddp.integrations.bluefog.bluefog_state import active_state, current_state
from asyncddp.integrations.bluefog.error_translation import translate_errors

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


class VerbCall(NamedTuple):
    """Call of an asyncddp operation: its blocking function, its non-blocking one, arguments.

    Attributes:
        run, start: The blocking variant and the non-blocking one.
        options: Arguments for either, ``name`` among them.
    """

    run: Callable[..., torch.Tensor]
    start: Callable[..., Handle[torch.Tensor]]
    options: dict[str, Any]


def full_name(prefix: str, name: str | None) -> str | None:
    """Prefix a name by the verb, as BlueFog does, so that different verbs may share it."""
    return None if name is None else f"{prefix}.{name}"


def blocking(plan: Callable[P, VerbCall]) -> Callable[P, torch.Tensor]:
    """Create a blocking verb from a function that returns the call to make."""

    @translate_errors()
    @functools.wraps(plan)
    def run(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        """Call the verb and wait for its result."""
        handles, call = active_state().collectives, plan(*args, **kwargs)
        handles.require_free_name(call.options["name"])
        return call.run(**call.options)

    return _with_return_type(run, torch.Tensor)


def nonblocking(form: Callable[P, torch.Tensor]) -> Callable[P, int]:
    """Create the non-blocking variant of a blocking verb."""
    plan = cast("Callable[P, VerbCall]", inspect.unwrap(form))

    @translate_errors()
    @functools.wraps(plan)
    def start(*args: P.args, **kwargs: P.kwargs) -> int:
        """Start the verb and return its handle."""
        handles, call = active_state().collectives, plan(*args, **kwargs)
        name = call.options["name"]
        handles.require_free_name(name)
        return handles.add(call.start(**call.options), name)

    name, trailing = plan.__name__.removesuffix("_"), "_" * plan.__name__.endswith("_")
    start.__name__ = start.__qualname__ = f"{name}_nonblocking{trailing}"
    start.__doc__ = f"Start :func:`{plan.__name__}` and give a handle for :func:`synchronize`."
    return _with_return_type(start, int)


def _with_return_type(form: F, kind: type) -> F:
    """Annotate a variant with its return type."""
    signature = inspect.signature(form).replace(return_annotation=kind)
    form.__signature__ = signature  # type: ignore[attr-defined]
    return form


@translate_errors()
def poll(handle: int) -> bool:
    """Return True if a verb has ended or failed; never waits.

    Raises:
        ArgumentError: There is no such handle under way.
    """
    return current_state().collectives.find("poll", handle).poll()


@translate_errors()
def synchronize(handle: int) -> torch.Tensor:
    """Wait for the result of a verb; its handle is gone then, also where the verb has failed.

    Raises:
        ArgumentError: There is no such handle under way.
        PeerError: The verb has failed because of another rank.
    """
    result: torch.Tensor = current_state().collectives.pop("synchronize", handle).wait()
    return result


wait = synchronize
