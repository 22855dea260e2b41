"""Forward and backward passes of a model and its modules, as spans that nest."""

from __future__ import annotations

import sys
import time
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from asyncddp.memory.allocate import zeros
from asyncddp.timeline.recorder import Recorder
from asyncddp.timeline.tracks import COMPUTATION

__all__ = ["Backward", "Passing", "compiles", "cost_of_module"]

_CALLS, _REPEATS = 50, 4


class Backward:
    """A backward pass: it comes to modules in turn, and has left one when it comes to the next.

    All models of a rank have one, through which their passes go.

    Args:
        recorder: Takes the notes.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._models = recorder, count()
        self._open: list[tuple[str, str, int]] = []

    @classmethod
    def of(cls, recorder: Recorder) -> Backward:
        """The one of a rank."""
        found = _every.get(recorder)
        if found is None:
            found = _every[recorder] = cls(recorder)
        return found

    def root(self) -> str:
        """The path of a model that is new to it."""
        return str(next(self._models))

    def reach(self, paths: list[tuple[str, str]]) -> None:
        """The pass comes to the output of modules, which are inside each other.

        Args:
            paths: Their paths, from the model's own, and the names they are noted by, outermost
                first.
        """
        now = time.monotonic_ns()
        if not self._open:
            Variable._execution_engine.queue_callback(self.end)
        for path, name in paths:
            self._leave(path, now)
            self._open.append((path, name, now))

    def end(self) -> None:
        """The pass has ended."""
        self._leave(None, time.monotonic_ns())

    def _leave(self, path: str | None, now: int) -> None:
        """Leave all modules that a path is not inside of."""
        while self._open and not _inside(path, self._open[-1][0]):
            _, name, begun = self._open.pop()
            self._recorder.span("backward", name, begun, now, None, COMPUTATION)


_every: WeakKeyDictionary[Recorder, Backward] = WeakKeyDictionary()


def _inside(path: str | None, outer: str) -> bool:
    """Whether a module is inside another."""
    return path is not None and path.startswith(f"{outer}.")


class _Mark:
    """Tells that a backward pass has come to a module's output.

    Args:
        backward: Whom to tell; it may be gone.
        path: The module's.
    """

    def __init__(self, backward: Backward, path: tuple[str, str]) -> None:
        self._backward = ref(backward)
        self.paths = [path]

    def __call__(self, gradients: Any) -> None:
        del gradients
        backward = self._backward()
        if backward is not None:
            backward.reach(self.paths)


class Passing:
    """Forward passes of one model.

    Modules are heard of by hooks of all modules, which are there while the model's own pass lasts
    and its modules are noted: so a module costs nothing in all other passes, and none is changed.

    Args:
        recorder: Takes the notes.
        model: The model.
        backward: Notes the backward passes.

    Attributes:
        modules_noted: Calls of modules that were noted since this was set to 0.
    """

    def __init__(self, recorder: Recorder, model: torch.nn.Module, backward: Backward) -> None:
        self._recorder, self._backward = recorder, backward
        self._model = ref(model)
        self._title, self._root = type(model).__name__, backward.root()
        self._paths: dict[torch.nn.Module, str] = {}
        self._hooks: list[RemovableHandle] = []
        self._open: list[tuple[torch.nn.Module, int]] = []
        self._begun: int | None = None
        self._last: tuple[Node, _Mark] | None = None
        self.modules_noted = 0

    @property
    def model(self) -> torch.nn.Module:
        """The model, which outlives its passes."""
        model = self._model()
        if model is None:
            raise RuntimeError("the model is gone")
        return model

    def begin(self, *, modules: bool) -> None:
        """A forward pass begins.

        Args:
            modules: Whether its modules are noted, too.
        """
        self._last, self._open = None, []
        self._unhook()
        if modules:
            self._paths = {one: path for path, one in self.model.named_modules() if path}
            self._hooks = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave),
            ]
        self._begun = time.monotonic_ns()

    def end(self, output: Any) -> None:
        """A forward pass has ended."""
        now, begun = time.monotonic_ns(), self._begun
        self._begun = None
        if begun is None:
            return  # the model has called itself, or somebody has copied its hooks
        self._unhook()
        self._recorder.span("forward", self._title, begun, now, None, COMPUTATION)
        self._mark((self._root, self._title), output)
        self._last = None

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._paths = {}

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        del args
        if module in self._paths:
            self._open.append((module, time.monotonic_ns()))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        del args
        now, path = time.monotonic_ns(), self._paths.get(module)
        while self._open and path is not None:
            inner, begun = self._open.pop()
            if inner is module:  # one that has raised has not left
                self.modules_noted += 1
                self._recorder.span("forward", path, begun, now, None, COMPUTATION)
                self._mark((f"{self._root}.{path}", path), output)
                return

    def _mark(self, path: tuple[str, str], output: Any) -> None:
        """Have the backward pass say when it comes to a module's output."""
        found = output if isinstance(output, torch.Tensor) else _first(output)
        node = None if found is None else found.grad_fn
        if node is None:
            return
        if self._last is not None and self._last[0] is node:  # what the last module inside gave
            self._last[1].paths.insert(0, path)
            return
        mark = _Mark(self._backward, path)
        node.register_prehook(mark)
        self._last = node, mark


def _first(output: Any) -> torch.Tensor | None:
    """The first tensor that a backward pass may come to."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            return leaf
    return None


def compiles() -> bool:
    """Whether torch has compiled something, whose modules must not be heard of any more."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["total"])


@cache
@torch.enable_grad()
def cost_of_module() -> float:
    """Nanoseconds that it costs here to note one call of a module, without writing it down."""
    recorder = Recorder(0, None)
    model = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(_CALLS)))
    passing = Passing(recorder, model, Backward(recorder))
    start = zeros((1,), torch.float32).requires_grad_()
    took: dict[bool, list[int]] = {False: [], True: []}
    for modules in (False, True) * _REPEATS:
        begun = time.thread_time_ns()
        passing.begin(modules=modules)
        x = start
        for one in model:
            x = one(x * 1.0)
        passing.end(x)
        x.backward()  # type: ignore[no-untyped-call]
        took[modules].append(time.thread_time_ns() - begun)
    return max(0, min(took[True]) - min(took[False])) / _CALLS
