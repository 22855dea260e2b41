"""The two forms of each verb, made from one plan, and handles that are whole numbers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch

from asyncddp.engine import Handle
from asyncddp.integrations.bluefog.errors import translated
from asyncddp.integrations.bluefog.state import state, working

__all__ = ["Call", "blocking", "full_name", "nonblocking", "poll", "synchronize", "wait"]

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


class Call(NamedTuple):
    """A call of one of our verbs, in both its forms.

    Attributes:
        run, start: The blocking form and the other.
        options: Arguments for either, its ``name`` among them.
    """

    run: Callable[..., torch.Tensor]
    start: Callable[..., Handle[torch.Tensor]]
    options: dict[str, Any]


def full_name(prefix: str, name: str | None) -> str | None:
    """BlueFog's full name, so that verbs of different kinds may have the same."""
    return None if name is None else f"{prefix}.{name}"


def blocking(plan: Callable[P, Call]) -> Callable[P, torch.Tensor]:
    """Make the blocking form of a verb from a function that says what to call."""

    @translated()
    @functools.wraps(plan)
    def run(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        """Call the verb and wait for it."""
        handles, call = working().collectives, plan(*args, **kwargs)
        handles.insist_on_free(call.options["name"])
        return call.run(**call.options)

    return _returning(run, torch.Tensor)


def nonblocking(form: Callable[P, torch.Tensor]) -> Callable[P, int]:
    """Make the non-blocking form of a verb from the blocking one."""
    plan = cast("Callable[P, Call]", inspect.unwrap(form))

    @translated()
    @functools.wraps(plan)
    def start(*args: P.args, **kwargs: P.kwargs) -> int:
        """Start the verb and give its number."""
        handles, call = working().collectives, plan(*args, **kwargs)
        name = call.options["name"]
        handles.insist_on_free(name)
        return handles.add(call.start(**call.options), name)

    name, trailing = plan.__name__.removesuffix("_"), "_" * plan.__name__.endswith("_")
    start.__name__ = start.__qualname__ = f"{name}_nonblocking{trailing}"
    start.__doc__ = f"Start :func:`{plan.__name__}` and give a handle for :func:`synchronize`."
    return _returning(start, int)


def _returning(form: F, kind: type) -> F:
    """Annotate a form with what it returns."""
    signature = inspect.signature(form).replace(return_annotation=kind)
    form.__signature__ = signature  # type: ignore[attr-defined]
    return form


@translated()
def poll(handle: int) -> bool:
    """Whether a verb has ended, well or not; never waits.

    Raises:
        ArgumentError: It is no handle of a verb under way.
    """
    return state().collectives.find("poll", handle).poll()


@translated()
def synchronize(handle: int) -> torch.Tensor:
    """Wait for the result of a verb; its handle is gone then, also where the verb has failed.

    Raises:
        ArgumentError: It is no handle of a verb under way.
        PeerError: The verb has failed because of another rank.
    """
    result: torch.Tensor = state().collectives.pop("synchronize", handle).wait()
    return result


wait = synchronize
