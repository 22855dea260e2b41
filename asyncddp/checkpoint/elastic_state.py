"""Training state of an elastic run, which ranks that join take over from another rank."""

from __future__ import annotations

import io
import logging
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from asyncddp.checkpoint.training_state import (
    HasState,
    check_fit,
    compact,
    load_state,
    own_state,
)
from asyncddp.context import current
from asyncddp.context.mesh_context import world_of
from asyncddp.engine import Handle
from asyncddp.errors import (
    ArgumentError,
    AsyncDDPError,
    EnvironmentProblem,
    UsageError,
    WaitTimeoutError,
)
from asyncddp.membership import View
from asyncddp.ops.state_transfer import receive_state, send_state
from asyncddp.optim.parameter_sync import keep_replica
from asyncddp.rank_list_text import list_ranks
from asyncddp.tensors.byte_views import from_bytes, to_bytes

logger = logging.getLogger("asyncddp")

_VERB = "ElasticState"
_KINDS: Mapping[str, tuple[type, str]] = {
    "model": (torch.nn.Module, "torch.nn.Module"),
    "optimizer": (torch.optim.Optimizer, "torch.optim.Optimizer"),
}
_METHODS = "state_dict()", "load_state_dict()"
_PLAIN = "tensors, numbers, strings, lists and dicts"
_ASK_SECONDS = 0.2  # between two requests to be let in


class ElasticState:
    """Training state of an elastic run, which a replacement process takes over from a rank.

    Make it on all ranks of an elastic run, once model and optimizer are wrapped, and loop over
    :meth:`steps`. A replacement, which ``asyncddp run --elastic --restarts N`` starts, waits here:
    from one step on, on which the members agree, it is a member as well, and the lowest of the
    others sends it its own state at the beginning of that step. So it makes the same steps as
    they do from then on, with its own gradients. The others wait for it in the first exchange with
    it, for as long as the bytes take; none of them goes back, or makes a step again.

    Args:
        model: The model, or the wrapper of it, whose state dict is sent.
        optimizer: The optimizer whose state goes along; None where there is none, or where the
            wrapper of the model holds it.
        scheduler: A scheduler, likewise.
        parts: Further objects with ``state_dict()`` and ``load_state_dict()`` by name, such as a
            data loader's sampler.

    Attributes:
        step: Number of the step that is under way, or the first one.
        joined: True on a rank that has taken its state over from another one.
        left: True once this rank has left, by ``leave()``, and others go on.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: This rank has given an object of a wrong kind. Or the others train another
            model, with another optimizer, or with other parts, or have objects in their state that
            ``torch.load(weights_only=True)`` refuses: on the replacement alone; the others go on.
        PeerLeftError: The rank that sends the state has died; end this process, and start it anew.
        EnvironmentProblem: No rank can join, since the others use windows: those of the user, or of
            an asynchronous method. Or a ``state_dict()`` of the rank that sends has failed; that
            rank warns, and goes on.
        UsageError: Replicas are sharded; on all ranks, with the first step.
        WaitTimeoutError: The others have not let this rank in by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> def train():
        ...     model = torch.nn.Linear(2, 1)
        ...     optimizer = bf.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
        ...     state = bf.ElasticState(model, optimizer)
        ...     for step in state.steps(3):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 2)).sum().backward()
        ...         optimizer.step()
        ...     return state.step
        >>> with bf.local_world(2, elastic=True) as world:
        ...     world.run(train)
        [3, 3]
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: HasState | None = None,
        **parts: HasState,
    ) -> None:
        optional = {"optimizer": optimizer, "scheduler": scheduler}
        given = {name: one for name, one in optional.items() if one is not None}
        _check_kinds({"model": model, **given, **parts})
        self._given = ["model", *given, *sorted(parts)]
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._parts, self._context, self.step = parts, current(), 0
        self._sends: list[Handle[None]] = []
        self._leaves = self._ends = self.left = False
        self._context.engine.refusal = _weakly(self._refusal)
        joining = self._context.transport.joining
        self.joined = joining is not None
        if joining is not None:
            self._join()
            joining.finish()
            self._context.transport.joining = None
        else:
            self._begin()

    def steps(self, stop: int) -> Iterator[int]:
        """Yield the numbers of the steps from ``step`` to ``stop``, as ``range`` does.

        Ranks join and leave between two of them. All ranks make steps of the same numbers. On a
        rank that leaves they end with the last step that it makes.
        """
        while self.step < stop:
            if self._context.engine.step != self.step:
                self._begin()
            if self._ends:
                return
            yield self.step
            self.step += 1

    def leave(self) -> None:
        """Let this rank leave between two steps, before which it trains on as the others do.

        The ranks agree on the step with which the others go on without it, so that nothing is lost
        or made again. ``steps`` ends on this rank, and ``left`` is True: end the process then,
        without further collectives. If all ranks leave, they end with the same step, and go on as
        after the last one.
        It may be called in a signal handler, such as that of a machine which is to be shut down::

            signal.signal(signal.SIGTERM, lambda *_: state.leave())

        Raises:
            UsageError: The run is not elastic.

        Example:
            >>> import asyncddp as bf, torch
            >>> def train():
            ...     state, sizes = bf.ElasticState(torch.nn.Linear(2, 1)), []
            ...     for step in state.steps(100):
            ...         sizes.append(int(bf.allreduce(torch.ones(1), average=False)))
            ...         if step == 5 and bf.rank() == 1:
            ...             state.leave()
            ...     return state.left, sizes[-1]
            >>> with bf.local_world(3, elastic=True) as world:
            ...     world.run(train)
            [(False, 2), (True, 3), (False, 2)]
        """
        if self._context.engine.membership is None:
            raise UsageError(
                f"{_VERB}.leave: the run is not elastic, so that the others would wait for this "
                "rank; start it by 'asyncddp run --elastic'"
            )
        self._leaves = True

    def _ask_to_leave(self) -> None:
        """Ask the others to go on without this rank, or end at once where they do not wait."""
        self._leaves = False
        if self._refusal():
            self._ends = self.left = True
        else:
            self._context.engine.leave()

    def _begin(self) -> None:
        """Begin a step, and send the state to ranks that join with it, if it is this one's turn."""
        engine, rank = self._context.engine, self._context.rank
        if world_of(self._context).engine.replica_agreements:
            raise UsageError(
                f"{_VERB}: replicas that are sharded can be lost, but neither leave nor be "
                "replaced: count the steps by range() in place of state.steps()"
            )
        if self._leaves:
            self._ask_to_leave()
        view = engine.begin_step(self.step)
        self._forget_sent()
        if view is None:
            return
        self._ends |= rank in view.left
        self.left |= self._ends and bool(view.members)
        if not view.joined or rank != _sponsor(view):
            return
        numbers = {"counts": dict(view.starts), "collectives": engine.collective_numbers()}
        file = self._record({"step": self.step, **numbers}, view.joined)
        data = from_bytes(file.getvalue(), torch.uint8, (file.tell(),))
        self._sends += [send_state(data, peer, _name(peer, self.step)) for peer in view.joined]

    def _record(self, numbers: Mapping[str, Any], joined: Iterable[int]) -> io.BytesIO:
        """Return the file with the state and these numbers, or with why there is no state."""
        file = io.BytesIO()
        try:
            torch.save(compact({**self._state(), **numbers}), file)
        except Exception as error:  # noqa: BLE001 - the replacement raises it; this rank trains on
            why = f"{type(error).__name__}: {error}"
            words = "rank %d: %s: no state can be made for %s: %s"
            logger.warning(words, self._context.rank, _VERB, list_ranks(joined), why)
            file = io.BytesIO()
            torch.save({"problem": why}, file)
        return file

    def _refusal(self) -> str:
        """Return why no rank can join; empty if ranks can."""
        pinned = sorted(self._context.topologies.pinned)
        if pinned:
            return f"no rank can join while there are windows: {', '.join(map(repr, pinned))}"
        for one in (self._model, self._optimizer, *self._parts.values()):
            averager = getattr(one, "_averager", None)
            if averager is not None and averager.communication.asynchronous:
                return (
                    f"no rank can join while {averager.label} averages by "
                    f"{averager.algorithm.name}, whose windows lie between the ranks of before; "
                    "take a method whose ranks wait for each other, such as adapt_then_combine"
                )
        return ""

    def _forget_sent(self) -> None:
        for handle in [one for one in self._sends if one.poll()]:
            self._sends.remove(handle)
            with suppress(AsyncDDPError):  # the rank has died, which is no news
                handle.wait()

    def _state(self) -> dict[str, Any]:
        found = own_state(self._model, self._optimizer, self._scheduler)
        parts = {name: one.state_dict() for name, one in self._parts.items()}
        return {**found, "parts": parts, "given": self._given}

    def _join(self) -> None:
        context = self._context
        view, rank = self._await_view(), context.rank
        first = context.engine.first_step()
        sponsor = _sponsor(view)
        found = _loaded(to_bytes(receive_state(sponsor, _name(rank, first))), rank, sponsor)
        if found["given"] != self._given:
            raise ArgumentError(
                f"{_VERB}: arguments: expected {', '.join(found['given'])}, as on rank {sponsor}, "
                f"got {', '.join(self._given)}; give the same objects by the same names on all "
                "ranks"
            )
        parts, source = (self._model, self._optimizer, self._scheduler), _source(sponsor)
        check_fit(_VERB, found, *parts, source)
        for name, part in self._parts.items():
            part.load_state_dict(found["parts"][name])
        load_state(found, *parts)
        keep_replica(self._model)
        self.step = found["step"]
        context.engine.adopt(self.step, found["counts"], found["collectives"])

    def _await_view(self) -> View:
        """Ask to be let in until there is a view with this rank; return it."""
        engine, joining = self._context.engine, self._context.transport.joining
        assert joining is not None
        deadline = time.monotonic() + self._context.config.timeout
        asked = -_ASK_SECONDS
        while (view := engine.view_to_join()) is None:
            if (now := time.monotonic()) > deadline:
                raise WaitTimeoutError(
                    f"rank {self._context.rank}: {_VERB}: the others have not let this rank in "
                    f"after {self._context.config.timeout:g} s; do they loop over the steps of an "
                    "asyncddp.ElasticState?"
                )
            if why := joining.refusal():
                raise EnvironmentProblem(f"rank {self._context.rank}: {_VERB}: {why}")
            if now - asked > _ASK_SECONDS:
                joining.ask_to_be_let_in()
                asked = now
            self._context.transport.backoff(0 if engine.progress() else 100)
        return view


def _check_kinds(given: Mapping[str, Any]) -> None:
    """Raise an error for an object of which no state can be sent, or taken over."""
    for name, one in given.items():
        kind, text = _KINDS.get(name, (object, ""))
        if not isinstance(one, kind):
            raise ArgumentError(
                f"{_VERB}: argument {name}: expected a {text}, got {type(one).__name__}; give the "
                "model first, its optimizer second, and others by name, such as scheduler="
            )
        lacks = [method for method in _METHODS if not callable(getattr(one, method[:-2], None))]
        if lacks:
            raise ArgumentError(
                f"{_VERB}: argument {name}: expected an object with {' and '.join(_METHODS)}, got "
                f"{type(one).__name__} without {' and '.join(lacks)}; add what it lacks, or leave "
                "it out"
            )


def _weakly(method: Callable[[], str]) -> Callable[[], str]:
    """Return a function that calls a method while its object lives, and gives nothing later."""
    found = weakref.WeakMethod(method)

    def call() -> str:
        living = found()
        return "" if living is None else living()

    return call


def _loaded(data: bytes | memoryview, rank: int, sponsor: int) -> dict[str, Any]:
    """Return what the sponsor has sent; raise an error where that is no state."""
    file = io.BytesIO(data)
    try:
        found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        file.seek(0)
        odd = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        raise ArgumentError(
            f"{_VERB}: {_source(sponsor)}: expected {_PLAIN} in state dicts, got "
            f"{odd or 'other objects'}; convert the others in state_dict()"
        ) from error
    if "problem" in found:
        raise EnvironmentProblem(
            f"rank {rank}: {_VERB}: rank {sponsor} could not make its state: {found['problem']}; "
            f"keep {_PLAIN} in state dicts"
        )
    return found


def _source(sponsor: int) -> str:
    return f"the state of rank {sponsor}"


def _sponsor(view: View) -> int:
    """Return the rank that sends its state to those that join."""
    return min(set(view.members).difference(view.joined))


def _name(peer: int, step: int) -> str:
    return f"<state of step {step} for rank {peer}>"
