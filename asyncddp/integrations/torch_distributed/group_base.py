"""Base class of asyncddp's torch process group: names, messages and closing, not collectives."""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch._C._distributed_c10d import Store

from asyncddp.device.stream_registry import stream_ordering_of
from asyncddp.engine import OperationSpec, in_sequence
from asyncddp.errors import ArgumentError, PeerError
from asyncddp.integrations.torch_distributed import collectives
from asyncddp.integrations.torch_distributed.arguments import (
    DEVICES,
    MAX_TAG,
    VerbOptions,
    as_list,
    check_tensors,
)
from asyncddp.integrations.torch_distributed.collectives import Operation
from asyncddp.integrations.torch_distributed.monitored_barrier import wait_monitored
from asyncddp.integrations.torch_distributed.work import BatchWork, FutureThread, GroupWork
from asyncddp.integrations.torch_distributed.world import close_group
from asyncddp.ops.process_group import ProcessGroup
from asyncddp.ops.slot_fast_path import run_in_slots
from asyncddp.torch_modes import uncompiled

_ProcessGroup: Any = dist.ProcessGroup
_open_groups: weakref.WeakSet[ProcessGroupBase] = weakref.WeakSet()
"""Groups whose threads must end before MPI does."""
_kept_stores: list[Store] = []
"""That of the default group closed last, which rank 0 serves to ranks that are not there yet."""
_ALIVE = 256  # works that are kept after their end: torch's C++ may still hold the object
_ALIVE_BYTES = 1 << 16  # of the tensors of each


class ProcessGroupBase(_ProcessGroup):  # type: ignore[misc]  # torch's stub is for the class in C++
    """Base class of asyncddp's torch process group, with everything but the collectives.

    Args:
        group: The library's group of its ranks, in a context of torch's world.
        store: The group's part of torch's store.
        timeout: Seconds after which a verb raises.
        title: The group's name for messages.

    Attributes:
        group: The argument ``group``.
        timeout: The current timeout, in seconds.
        failure: The error after which no verb of the group can run; None if there was none.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, group: ProcessGroup, store: Store, timeout: float, title: str) -> None:
        place = group.rank
        assert place is not None
        super().__init__(place, group.size)
        self.group, self.timeout, self.title, self._place = group, timeout, title, place
        self.failure: BaseException | None = None
        self._store, self._names = store, {"name": "", "description": ""}
        self._futures = FutureThread(title)
        self._pending: dict[GroupWork, bool] = {}  # and whether it is a collective
        self._alive: deque[GroupWork] = deque(maxlen=_ALIVE)
        self._batch: list[dist.Work] | None = None
        self._barriers = 0
        _open_groups.add(self)
        atexit.unregister(_end_groups)
        atexit.register(_end_groups)  # anew, so that it runs before what ends MPI

    def require_working(self, verb: str) -> None:
        """Raise a PeerError if an earlier verb of the group has failed."""
        if self.failure is not None:
            raise self._refusal(verb, self.failure)

    def _refusal(self, verb: str, failure: BaseException) -> PeerError:
        error = PeerError(
            f"rank {self.group.context.rank}: {verb}: {self.title} cannot go on after "
            f"{type(failure).__name__}: {failure}"
        )
        error.__cause__ = failure
        return error

    def _submit(
        self,
        verb: str,
        options: VerbOptions,
        operations: Sequence[Operation],
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor] = (),
        value: Callable[[], Any] | None = None,
        *,
        names_source: bool = False,
    ) -> GroupWork:
        """Run operations as one, or submit them; return their work, already ended if blocking.

        With ``names_source`` the result is the rank that has sent a message.
        """
        self.require_working(verb)
        spec: OperationSpec[Any] = (
            operations[0] if len(operations) == 1 else in_sequence(operations)
        )
        orderings = [one.stream_ordering for one in operations if one.stream_ordering is not None]
        used = [one for ordering in orderings for one in ordering.tensors]
        ordering = stream_ordering_of(*used, *outputs, *inputs) if used else None
        timeout = self.timeout if options.timeout is None else options.timeout
        work = GroupWork(outputs, self._futures, ordering, value)
        if sum(one.nbytes for one in outputs) <= _ALIVE_BYTES:
            self._alive.append(work)
        engine = self.group.context.engine
        if options.blocking and self._batch is None:
            spec = replace(spec, stream_ordering=ordering, timeout=timeout)
            self._run(work, verb, lambda: run_in_slots(engine, spec, [*outputs, *inputs]))
        else:
            self._pending[work] = spec.ordered
            if names_source:
                spec = spec.then(partial(_note_source, self.group, work))
            on_end = partial(self._end, work, verb)
            spec = replace(spec, stream_ordering=ordering, timeout=timeout, on_end=on_end)
            work.handle = engine.submit(spec, about=[*outputs, *inputs])
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _run(self, work: GroupWork, verb: str, run: Callable[[], object]) -> None:
        """Run a work on this thread; raise only non-errors such as Ctrl-C."""
        problem: BaseException | None = None
        try:
            run()
        except BaseException as error:
            problem = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._end(work, verb, problem)

    def _end(self, work: GroupWork, verb: str, error: BaseException | None) -> None:
        """End a work; after an error, end all other works of the group too."""
        self._pending.pop(work, None)
        if error is not None and self.failure is None:
            self.failure = error
            for other in list(self._pending):
                if other.handle is not None:
                    other.handle.fail(self._refusal(verb, error))
        work.end(error)

    @uncompiled
    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Start sending a tensor to a rank of the group."""
        tensor = self._message("send", tensors, dstRank, tag)
        spec = collectives.send(self.group, tensor, self.group.ranks[dstRank], tag)
        return self._submit("send", VerbOptions(), [spec], [tensor])

    @uncompiled
    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Start receiving a tensor from a rank of the group."""
        tensor = self._message("recv", tensors, srcRank, tag)
        spec = collectives.receive(self.group, tensor, [self.group.ranks[srcRank]], tag)
        work = self._submit("recv", VerbOptions(), [spec], [tensor])
        work.source = srcRank
        return work

    @uncompiled
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from whichever rank sends first."""
        tensor = self._message("recv_anysource", tensors, None, tag)
        others = [rank for rank in self.group.ranks if rank != self.group.context.rank]
        spec = collectives.receive(self.group, tensor, others, tag)
        return self._submit("recv_anysource", VerbOptions(), [spec], [tensor], names_source=True)

    def _message(self, verb: str, tensors: Any, peer: int | None, tag: int) -> torch.Tensor:
        """Return the tensor of a message, after checking its peer and tag."""
        given = as_list(tensors)
        check_tensors(verb, given)
        if peer is not None and (not 0 <= peer < self.group.size or peer == self._place):
            raise ArgumentError(
                f"{verb}: expected another rank of the group, from 0 to {self.group.size - 1}, "
                f"got {peer}"
            )
        if not 0 <= tag <= MAX_TAG:
            raise ArgumentError(f"{verb}: argument tag: expected 0 to {MAX_TAG}, got {tag}")
        return given[0]

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; on a timeout the error names missing ranks, on all ranks."""
        self.require_working("monitored_barrier")
        self._barriers += 1
        seconds = self.timeout if timeout is None else timeout.total_seconds()
        wait_monitored(
            self._store, self.group.ranks, self._place, self._barriers, seconds, wait_all_ranks
        )

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the works of all verbs until :meth:`_end_coalescing`."""
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Return one work for all works since :meth:`_start_coalescing`."""
        batch, self._batch = self._batch or [], None
        return BatchWork(batch)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later verbs that get none of their own."""
        self.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Wait for queued collectives, and close the transport; may be called again."""
        if self in _open_groups:
            _open_groups.discard(self)
            for work in [one for one, collective in self._pending.items() if collective]:
                with suppress(Exception):  # kept by the work
                    work.wait()
            self._close("it was destroyed")

    def abort(self) -> None:
        """Let verbs in progress fail, and close the group."""
        _open_groups.discard(self)
        self._close("it was aborted")

    def _close(self, why: str) -> None:
        self.failure = self.failure or PeerError(why)
        for work in list(self._pending):
            if work.handle is not None:
                work.handle.fail(self._refusal("a verb", self.failure))
        self._futures.close()
        if self.group.transport is self.group.context.transport:
            _kept_stores[:] = [self._store]
        close_group(self.group, why)

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self._place

    def size(self) -> int:
        """Return the number of ranks of the group."""
        return self.group.size

    def name(self) -> str:
        """Return the name of the backend."""
        return "asyncddp"

    getRank, getSize, getBackendName = rank, size, name  # noqa: N815 - what C++ asks for

    def setGroupName(self, name: str) -> None:  # noqa: N802 - what C++ asks for
        """Set torch's name of the group."""
        self._names["name"] = name

    def getGroupName(self) -> str:  # noqa: N802 - what C++ asks for
        """Return torch's name of the group."""
        return self._names["name"]

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - what C++ asks for
        """Set torch's description of the group."""
        self._names["description"] = description

    def getGroupDesc(self) -> str:  # noqa: N802 - what C++ asks for
        """Return torch's description of the group."""
        return self._names["description"]

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        here = torch.cuda.is_available()
        return [torch.device(name) for name in DEVICES if name == "cpu" or here]

    def _get_backend(self, device: torch.device) -> ProcessGroupBase:
        return self

    def _get_backend_name(self) -> str:
        return self.name()

    def get_group_store(self) -> Store:
        """Return the group's part of torch's store."""
        return self._store

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: the group allocates no special memory for tensors."""
        return False


def _note_source(group: ProcessGroup, work: GroupWork, source: int) -> None:
    """Store the group rank that has sent a message in the message's work."""
    work.source = group.ranks.index(source)


def _end_groups() -> None:
    """Close all groups at the interpreter's exit, before MPI is finalized."""
    for group in list(_open_groups):
        _open_groups.discard(group)
        group._close("the script has ended")
