"""Process group without its collectives: names, messages, coalescing, its end."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from asyncddp.device.stream_registry import stream_ordering_of
from asyncddp.errors import PeerError
from asyncddp.integrations.torch_distributed.arguments import VerbOptions, as_list
from asyncddp.integrations.torch_distributed.group_channel import GroupChannel
from asyncddp.integrations.torch_distributed.monitored_barrier import wait_monitored
from asyncddp.integrations.torch_distributed.output_buffers import (
    DEVICES,
    OutputBuffer,
    check_tensors,
)
from asyncddp.integrations.torch_distributed.point_to_point import (
    AnySourceRequest,
    MessageProgress,
    MessageWork,
    check_message,
)
from asyncddp.integrations.torch_distributed.work import GroupWork
from asyncddp.integrations.torch_distributed.work_queue import QueuedWork, WorkQueue
from asyncddp.torch_modes import uncompiled
from asyncddp.transport import Transport
from asyncddp.transport.base import Request

_ProcessGroup: Any = dist.ProcessGroup
_open_groups: weakref.WeakSet[ProcessGroupBase] = weakref.WeakSet()
"""Groups whose threads must end before MPI does."""


class ProcessGroupBase(_ProcessGroup):  # type: ignore[misc]  # torch's stub is for the class in C++
    """Process group without its collectives.

    Args:
        transport: Between the ranks of the group, its own; closed by :meth:`shutdown`.
        store: The group's part of torch's store.
        ranks: The numbers of its ranks in the world.
        timeout: Seconds after which a verb raises.
        title: The group's name for messages.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(
        self, transport: Transport, store: Store, ranks: Sequence[int], timeout: float, title: str
    ) -> None:
        super().__init__(transport.rank, transport.size)
        self.channel = GroupChannel(transport, store, ranks, timeout, title)
        self._store, self._names = store, {"name": "", "description": ""}
        self._queue = WorkQueue(title)
        self.channel.is_patient = lambda: self._queue.patient
        self._progress = MessageProgress(title)
        self._batch: list[dist.Work] | None = None
        self._barriers = 0
        _open_groups.add(self)
        atexit.unregister(_end_threads)
        atexit.register(_end_threads)  # anew, so that it runs before what ends MPI

    def _submit(
        self,
        verb: str,
        options: VerbOptions,
        programs: Sequence[Callable[[], None]],
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor] = (),
        value: Callable[[], Any] | None = None,
    ) -> dist.Work:
        """Run a collective, or queue it; return its work, which a blocking one has ended."""
        self.channel.require_working(verb)

        def run() -> None:
            with self.channel.collective(verb, options.timeout):
                for program in programs:
                    program()

        tensors = [*outputs, *inputs]
        ordering = stream_ordering_of(*tensors) if tensors else None
        work = QueuedWork(verb, outputs, value, ordering)
        blocking = options.blocking and self._batch is None
        self._queue.submit(work, run, blocking=blocking)
        return self._batched(work)

    def _batched(self, work: GroupWork) -> dist.Work:
        if self._batch is not None:
            self._batch.append(work)
        return work

    @uncompiled
    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Start sending a tensor to a rank of the group."""
        tensor = as_list(tensors)[0]
        self._check_message("send", tensor, dstRank, tag)
        isend = self.channel.message_transport_for(tensor).isend
        title = f"send to {self._name_of(dstRank)}, tag {tag}"
        return self._message(title, tensor, lambda data: isend(data, dstRank, tag), sends=True)

    @uncompiled
    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Start receiving a tensor from a rank of the group."""
        tensor = as_list(tensors)[0]
        self._check_message("recv", tensor, srcRank, tag)
        irecv = self.channel.message_transport_for(tensor).irecv
        title = f"recv from {self._name_of(srcRank)}, tag {tag}"
        return self._message(title, tensor, lambda data: irecv(data, srcRank, tag))

    @uncompiled
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from whichever rank sends first."""
        tensor = as_list(tensors)[0]
        self._check_message("recv_anysource", tensor, None, tag)
        title = f"recv from any rank, tag {tag}"
        return self._message(title, tensor, lambda data: AnySourceRequest(self.channel, data, tag))

    def _check_message(self, verb: str, tensor: torch.Tensor, peer: int | None, tag: int) -> None:
        self.channel.require_working(verb)
        check_tensors(verb, [tensor])
        check_message(verb, self.channel, peer, tag)

    def _name_of(self, rank: int) -> str:
        return f"rank {self.channel.ranks[rank]}"

    def _message(
        self,
        title: str,
        tensor: torch.Tensor,
        start: Callable[[torch.Tensor], Request],
        *,
        sends: bool = False,
    ) -> dist.Work:
        ordering = stream_ordering_of(tensor)
        with nullcontext() if ordering is None else ordering.running(), self.channel.messages_lock:
            buffer = OutputBuffer(tensor, read=sends)
            request = start(buffer.data)
        finish = _nothing if sends else buffer.store
        return self._batched(
            MessageWork(title, self.channel, request, tensor, finish, self._progress, ordering)
        )

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; an error on all of them names those that do not come."""
        self._barriers += 1
        wait_monitored(
            self.channel, self._store, self._barriers, timeout, wait_all_ranks=wait_all_ranks
        )

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the works of all verbs until :meth:`_end_coalescing`."""
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Return one work for all since :meth:`_start_coalescing`."""
        batch, self._batch = self._batch or [], None
        return BatchWork(batch)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later verbs that are not given one."""
        self.channel.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Let queued collectives end, and give the transport back; harmless when called twice."""
        if self in _open_groups:
            _open_groups.discard(self)
            self._queue.close()
            self._progress.close()
            self.channel.failure = PeerError("it was destroyed")
            self.channel.close()

    def abort(self) -> None:
        """Let verbs that are under way fail, and close the group."""
        if self.channel.failure is None:
            self.channel.failure = PeerError("it was aborted")
        self.shutdown()

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self.channel.rank

    def size(self) -> int:
        """Return the number of ranks of the group."""
        return self.channel.size

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
        """Return False: tensors of the group lie in ordinary memory."""
        return False


class BatchWork(dist.Work):
    """Work of all verbs of a coalesced batch."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all works, and raise the first error."""
        return all([work.wait(timeout) for work in self._works])

    def is_completed(self) -> bool:
        """Return True if all works have ended."""
        return all([work.is_completed() for work in self._works])

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of all works' values."""
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures)


def _nothing() -> None:
    return None


def _end_threads() -> None:
    """End the threads of all groups at the interpreter's exit, before MPI is finalized."""
    for group in list(_open_groups):
        group.channel.failure = group.channel.failure or PeerError("the script has ended")
        group.shutdown()
