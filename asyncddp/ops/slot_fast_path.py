"""Fast path of shared-memory collectives, which runs on the calling thread.

Everything that does not depend on a tensor's values is computed in the first call of a verb with
given arguments, and reused in later calls. If a rank does not come at once, anything differs
between ranks, or a large tensor takes long, the engine takes over at the point that was reached.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from msgspec.structs import replace
from torch.autograd import profiler

from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import (
    Handle,
    OperationSpec,
    ProgressEngine,
    SlotExchange,
    StartedCollective,
)
from asyncddp.engine.messages import MatchKey
from asyncddp.engine.pairwise_averaging import poll_briefly
from asyncddp.engine.slot_exchange import Start, interrupted_steps
from asyncddp.errors import PeerError
from asyncddp.shm.collective_slots import SLOTS
from asyncddp.tensors.byte_views import has_plain_memory
from asyncddp.torch_modes import transforming

R = TypeVar("R")

_REMEMBERED = 1024  # fast paths of an engine


class SlotFastPath(Generic[R]):
    """Fast path of a shared-memory collective that is repeated with one dtype and shape."""

    def __init__(
        self,
        engine: ProgressEngine,
        spec: OperationSpec[R],
        exchange: SlotExchange[R],
        dtype: torch.dtype | None,
    ) -> None:
        self._engine, self._slots = engine, engine.matcher.slots[spec.group]
        self._exchange, self._digest = exchange, exchange.digest
        self._combine, self._start = exchange.combine, exchange.start
        self._verb, self._label, self._name = spec.verb, spec.label, spec.match_name
        self._given_name, self._group = spec.name, spec.group
        self._parts: dict[int, Sequence[torch.Tensor]] = {}  # of each slot, if of one shape
        gives = exchange.gives and exchange.combine is not None
        self._sequence, self._as_it_is = spec.sequence, gives and dtype is exchange.dtype

    def run(
        self,
        given: torch.Tensor | None,
        out: torch.Tensor | None,
        make_spec: Callable[[], OperationSpec[R]],
        *,
        plain: bool,
    ) -> R:
        """Run a collective on a tensor; let the engine continue it if a rank does not come soon.

        ``plain`` tells that the tensor has plain memory in the sense of :func:`has_plain_memory`.
        """
        engine, slots, exchange, digest = self._engine, self._slots, self._exchange, self._digest
        data = given if plain and self._as_it_is else exchange.data_of(given)
        started: StartedCollective[R] | None = None
        if engine.deferred.unsent:
            engine.deferred.send()
        with engine.submit_lock:  # so that no other collective of this rank begins meanwhile
            # the members may have changed since this path was found
            anew = None if self._is_current() else engine.planned_for_view(make_spec())
            name = self._name if anew is None else anew.match_name
            alone = engine.is_free(self._sequence) and anew is None
            number, rounds = engine.count(self._verb, self._label, name)
            step = slots.first + number
            agreed = (
                alone and slots.has_room(step) and not engine.matcher.is_refused_at(name, number)
            )
            try:
                if agreed:
                    slots.post(step, digest, data)
                    agreed = (
                        slots.all_posted(step)
                        or poll_briefly(partial(slots.all_posted, step), engine.pause)
                    ) and slots.agree(step, digest)
                if agreed and self._start is not None:
                    started = self._try_to_start(self._start, step, given, out)
                    agreed = started is not None and started.completed
                if not agreed:
                    spec = anew or make_spec()
                    if started is not None:
                        steps = partial(started.resume, slots.ranks, exchange.signature)
                        spec = replace(spec, steps=steps, slot_call=None)
                    work = engine.add(spec, MatchKey(name, number), rounds)
            except BaseException:
                if anew is None:
                    self._interrupt(number, rounds)
                else:  # nothing was posted, and the others wait for it
                    engine.add(anew, MatchKey(name, number), rounds)
                raise
            if agreed and self._combine is not None:
                try:
                    return self._combine(self._read(step), given, out)
                finally:
                    slots.finish(step)
        if started is not None and started.completed:
            return started.finish()
        return Handle(engine, work).wait()

    def _is_current(self) -> bool:
        """Return whether the slots are still those of the ranks that take part."""
        engine = self._engine
        return engine.membership is None or engine.matcher.slots.get(self._group) is self._slots

    def _read(self, step: int) -> Sequence[torch.Tensor]:
        """Return the tensors that all ranks have written to the slots of a step."""
        parts = self._parts.get(step % SLOTS)
        if parts is None:
            exchange = self._exchange
            parts = self._slots.read(step, exchange.dtype, exchange.shape)
            if -1 not in exchange.shape:
                self._parts[step % SLOTS] = parts
        return parts

    def _try_to_start(
        self,
        start: Start[R],
        step: int,
        given: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> StartedCollective[R] | None:
        """Start the transport's collective after agreement, and progress it on the calling thread.

        Returns None if the engine must start it: the engine is busy, or the transport refuses.
        """
        lock = self._engine.lock
        if not lock.acquire(blocking=False):
            return None
        try:
            started = start(self._read(step), given, out)
            self._slots.finish(step)
            started.poll(self._engine.pause)
        except PeerError:  # the engine is refused, too, and tells the peers
            return None
        finally:
            lock.release()
        return started

    def _interrupt(self, number: int, rounds: int) -> None:
        """Fail a collective that was interrupted, for example by Ctrl-C, and notify the peers."""
        key = MatchKey(self._name, number)
        steps = partial(interrupted_steps, self._slots, what=f"{self._verb} {key}")
        spec = OperationSpec(self._verb, steps, self._given_name, ordered=True, group=self._group)
        self._engine.add(spec, key, rounds)
        if self._engine.thread is not None:
            self._engine.thread.wake()


def run_in_slots(engine: ProgressEngine, spec: OperationSpec[R], about: Sequence[object] = ()) -> R:
    """Run an operation on the calling thread, in slots if possible, and return its result."""
    call = spec.slot_call
    path = None if call is None or _is_recorded(engine) else _path_of(engine, spec)
    if path is None or call is None:
        return engine.run(spec, about)
    return path.run(call.given, call.out, lambda: spec, plain=False)


def run_repeated(
    engine: ProgressEngine,
    plan: Callable[..., OperationSpec[R]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    make_spec: Callable[[], OperationSpec[R]],
) -> R:
    """Run a collective verb; repeated calls with equal arguments reuse the first call's plan."""
    given, out = args[0] if args else None, kwargs.get("out")
    paths: dict[Hashable, SlotFastPath[Any]] = engine.slot_paths
    key = None
    if "tensor" not in kwargs and _have_memory(given, out) and not _is_recorded(engine):
        key = _key_of(plan, args, kwargs, out)
        try:
            path: SlotFastPath[R] | None = None if key is None else paths.get(key)
        except TypeError:  # an argument without hash
            path = key = None
        if path is not None:
            return path.run(given, out, make_spec, plain=True)
    spec = make_spec()
    if key is not None and (path := _path_of(engine, spec)) is not None:
        if len(paths) >= _REMEMBERED:
            paths.clear()
        paths[key] = path
    return run_in_slots(engine, spec, args)


def _key_of(
    plan: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    out: torch.Tensor | None,
) -> Hashable | None:
    """Return a key that is equal for all calls of a verb that one fast path serves.

    It is None if an argument, such as the root, is a tensor, because its values may change.
    """
    key: tuple[Hashable, ...] = (plan,)
    if args:
        given: torch.Tensor = args[0]
        key = plan, given.dtype, given.shape
        if len(args) > 1:
            if any([isinstance(one, torch.Tensor) for one in args[1:]]):
                return None
            key += args[1:], tuple(map(type, args))  # 1 and True are equal
    if kwargs:
        others = [(name, one) for name, one in kwargs.items() if name != "out"]
        if any([isinstance(one, torch.Tensor) for _, one in others]):
            return None
        key += tuple((name, type(one), one) for name, one in others)
    return key if out is None else (*key, out.dtype, out.shape)


def _have_memory(given: object, out: Any) -> bool:
    """Return True if the tensors can be read and written directly in their memory."""
    if torch.is_inference_mode_enabled() or transforming() is not None:
        return False
    if given is not None and not _has_memory(given):
        return False
    return out is None or ((out is given or _has_memory(out)) and not out.is_inference())


def _has_memory(tensor: object) -> bool:
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    return has_plain_memory(tensor) and streams_of(tensor) is None


def _is_recorded(engine: ProgressEngine) -> bool:
    """Return True while calls are recorded in the timeline or by torch's profiler."""
    return engine.tracer is not None or bool(profiler._is_profiler_enabled)


def _path_of(engine: ProgressEngine, spec: OperationSpec[R]) -> SlotFastPath[R] | None:
    """Return the fast path of an operation; None without slots, or if the engine must run it."""
    call = spec.slot_call
    if call is None or spec.group not in engine.matcher.slots:
        return None
    exchange = call.exchange
    if exchange.combine is None and (exchange.start is None or spec.stream_ordering is not None):
        return None
    if engine.membership is not None and (spec.again is None or exchange.start is not None):
        return None  # only the engine does again what a death has interrupted
    dtype = None if call.given is None else call.given.dtype
    return SlotFastPath(engine, spec, exchange, dtype)
