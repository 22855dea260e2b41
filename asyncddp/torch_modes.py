"""Support for torch's inference mode and ``torch.compile``; ``torch.func`` is rejected."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import _C
from torch._C import _functorch
from torch._C._dynamo import eval_frame as _eval_frame

from asyncddp.errors import ArgumentError

F = TypeVar("F", bound=Callable[..., Any])
_NULL_CONTEXT = nullcontext()
_VIEW_TRACKING = _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)
transforming: Callable[[], object | None] = _functorch.peek_interpreter_stack
"""Returns something other than None within a function that ``torch.func`` transforms."""


def normal_mode() -> AbstractContextManager[object]:
    """Leave ``torch.inference_mode`` in the ``with`` block, so that it makes normal tensors.

    A tensor that is made in inference mode is refused by everything in place outside of it, and so
    must not be kept for later calls.

    Example:
        >>> with torch.inference_mode(), normal_mode():
        ...     torch.zeros(1).is_inference()
        False
    """
    return inference_mode(enabled=False)


@contextmanager
def untracked_views() -> Iterator[None]:
    """Make views that autograd does not track: tensors that share memory with another.

    Each has a version counter of its own and may be changed in place, whatever autograd makes of
    that. Views are also made faster so.

    Example:
        >>> with untracked_views():
        ...     one, other = torch.zeros(2).split(1)
        >>> one.add_(torch.ones(1, requires_grad=True)).requires_grad, other.requires_grad
        (True, False)
    """
    with _C._AutoDispatchBelowAutograd(), _C._ExcludeDispatchKeyGuard(_VIEW_TRACKING):
        yield


def inference_mode(*, enabled: bool) -> AbstractContextManager[object]:
    """Enter or leave ``torch.inference_mode``; almost free if the mode does not change."""
    if torch.is_inference_mode_enabled() == enabled:
        return _NULL_CONTEXT
    return torch.inference_mode(enabled)


def refuse_transforms(verb: str) -> None:
    """Raise an error inside a ``torch.func`` transform: its tensors have no memory to send."""
    if transforming() is not None:
        raise ArgumentError(
            f"{verb}: called within a function that torch.func transforms (vmap, grad, jvp, ...); "
            "expected a call outside of it. Call the transformed function first, and pass its "
            f"result to {verb}"
        )


def uncompiled(function: F) -> F:
    """Make ``torch.compile`` call a function without tracing into it.

    The graph of the caller breaks there. ``torch.compiler.disable`` does the same, but imports the
    compiler, which takes longer than all the rest of a start.

    Example:
        >>> @uncompiled
        ... def double(x):
        ...     return 2 * x
        >>> double(4)
        8
    """
    if hasattr(_eval_frame, "set_code_exec_strategy"):
        skip = _eval_frame._FrameAction.SKIP
        strategy = _eval_frame._FrameExecStrategy(skip, skip)
        _eval_frame.set_code_exec_strategy(function.__code__, strategy)
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:  # torch before 2.7 cannot mark the code
        before = _eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _eval_frame.set_eval_frame(before)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast("F", call)
