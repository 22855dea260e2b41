"""Tracers of forward and backward passes: record nested timeline spans of modules."""

from __future__ import annotations

import sys
import time
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from asyncddp.algorithms.gradient_hooks import remove_hooks
from asyncddp.tensors.allocation import zeros
from asyncddp.timeline.tracer import Tracer
from asyncddp.timeline.tracks import COMPUTATION

_CALLS, _REPEATS = 50, 4


class BackwardSpanRecorder:
    """Tracer of backward passes: records a timeline span for each module that a pass reaches.

    A module's span ends when the pass reaches a module outside of it. All models of a rank share
    one tracer.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer, self.model_numbers = tracer, count()
        self._open: list[tuple[str, str, int]] = []

    def enter_modules(self, paths: list[tuple[str, str]], gradients: Any) -> None:
        """Begin trace spans of modules whose output the pass has reached; an autograd hook."""
        now = time.monotonic_ns()
        if not self._open:
            Variable._execution_engine.queue_callback(self.end)
        for path, name in paths:
            self._leave(path, now)
            self._open.append((path, name, now))

    def end(self) -> None:
        """End the pass, and record its open spans."""
        self._leave("", time.monotonic_ns())

    def _leave(self, path: str, now: int) -> None:
        """End and record the spans of all modules that do not contain a path."""
        while self._open and not path.startswith(f"{self._open[-1][0]}."):
            _, name, start = self._open.pop()
            self._tracer.record_span("backward", name, start, now, None, COMPUTATION)


class ForwardSpanRecorder:
    """Tracer of one model's forward passes: records timeline spans of the model and its modules.

    Modules are traced by torch's global module hooks, which are registered only while a pass of the
    model lasts whose modules are traced: all other passes cost nothing, and no module is changed.
    """

    def __init__(
        self, tracer: Tracer, model: torch.nn.Module, backward: BackwardSpanRecorder
    ) -> None:
        self._tracer, self._backward = tracer, backward
        self._model_name, self._root = type(model).__name__, str(next(backward.model_numbers))
        self._paths: dict[torch.nn.Module, str] = {}
        self._hooks: list[RemovableHandle] = []
        self._open: list[tuple[torch.nn.Module, int]] = []
        self._start: int | None = None
        self._last: tuple[Node, list[tuple[str, str]]] | None = None
        self.traced_module_count = 0

    def begin(self, model: torch.nn.Module, *, modules: bool) -> None:
        """Begin a forward pass; ``modules`` traces the modules as well."""
        self._last, self._open = None, []
        self._unhook()
        if modules:
            self._paths = {one: path for path, one in model.named_modules() if path}
            self._hooks = [
                register_module_forward_pre_hook(self._begin_module),
                register_module_forward_hook(self._leave),
            ]
        self._start = time.monotonic_ns()

    def end(self, output: Any) -> None:
        """End a forward pass, and record its span."""
        now, start = time.monotonic_ns(), self._start
        self._start = None
        if start is None:
            return  # the model has called itself, or its hooks were copied
        self._unhook()
        self._tracer.record_span("forward", self._model_name, start, now, None, COMPUTATION)
        self._hook_output((self._root, self._model_name), output)
        self._last = None

    def _unhook(self) -> None:
        remove_hooks(self._hooks)
        self._paths = {}

    def _begin_module(self, module: torch.nn.Module, args: Any) -> None:
        if module in self._paths:
            self._open.append((module, time.monotonic_ns()))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        now, path = time.monotonic_ns(), self._paths.get(module)
        while self._open and path is not None:
            inner, start = self._open.pop()
            if inner is module:  # a module that raised has no end
                self.traced_module_count += 1
                self._tracer.record_span("forward", path, start, now, None, COMPUTATION)
                self._hook_output((f"{self._root}.{path}", path), output)
                return

    def _hook_output(self, path: tuple[str, str], output: Any) -> None:
        """Register a pre-hook that reports when a backward pass reaches a module's output."""
        leaves = (output,) if isinstance(output, torch.Tensor) else tree_leaves(output)
        nodes = (leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor))
        node = next(filter(None, nodes), None)
        if node is None:
            return
        if self._last is not None and self._last[0] is node:  # the output of the last inner module
            self._last[1].insert(0, path)
            return
        paths = [path]
        node.register_prehook(partial(self._backward.enter_modules, paths))
        self._last = node, paths


def has_compiled() -> bool:
    """Return whether torch.compile has run; afterwards modules must not be hooked."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["total"])


@cache
@torch.enable_grad()
def module_tracing_cost() -> float:
    """Measure the cost of tracing one module call in nanoseconds, without writing it."""
    tracer = Tracer(0, None)
    model = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(_CALLS)))
    forward_tracer = ForwardSpanRecorder(tracer, model, BackwardSpanRecorder(tracer))
    inputs = zeros((1,), torch.float32).requires_grad_()
    took: dict[bool, list[int]] = {False: [], True: []}
    for modules in (False, True) * _REPEATS:
        start = time.thread_time_ns()
        forward_tracer.begin(model, modules=modules)
        x = inputs
        for one in model:
            x = one(x * 1.0)
        forward_tracer.end(x)
        x.backward()  # type: ignore[no-untyped-call]
        took[modules].append(time.thread_time_ns() - start)
    return max(0, min(took[True]) - min(took[False])) / _CALLS
