"""``nccl``: transport of GPU tensors by NCCL, through the Python package cupy.

:mod:`~asyncddp.transport.cuda.nccl.point_to_point` explains how messages, which match by tag, use a
library that matches by order. On a GPU a communicator of one rank has run; tests run the rest over
a simulation of NCCL that checks arguments, delays work, and detects deadlocks between ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from typing_extensions import override

from asyncddp.device.stream_interfaces import DeviceStreams
from asyncddp.errors import EnvironmentProblem, WaitTimeoutError
from asyncddp.install_commands import install_command
from asyncddp.tensors.byte_views import from_bytes
from asyncddp.tensors.means import rounds
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.capabilities import DeviceCapabilities, ranks_without, unknown_gpu
from asyncddp.transport.cuda.device_transport import forward_to
from asyncddp.transport.cuda.nccl.communicator import (
    NCCLCommunicator,
    abort_when_open,
    communicator_budget,
    open_in_thread,
    run_in_threads,
)
from asyncddp.transport.cuda.nccl.cupy_bindings import (
    CupyBindings,
    create_unique_id,
    describe_conflict,
    gpu_sharing_settings,
    library,
    limit_channels,
    versions,
)
from asyncddp.transport.cuda.nccl.nccl_collectives import NCCLCollectives, has_sum
from asyncddp.transport.cuda.nccl.point_to_point import NCCLPointToPoint
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport
from asyncddp.transport.record_gathering import gather_records

_MIN_VERSION = 20700  # send and recv came with 2.7
_ID_BYTES = 128
_OPEN_TIMEOUT = 60.0  # seconds for the ranks of a part to find each other


class NCCLTransport(CudaStagedTransport):
    """Transport of GPU tensors by NCCL: collectives and point-to-point messages.

    Collectives run on one stream, and messages on one stream per peer, after earlier enqueued work.
    A request is complete with respect to all work enqueued on the COMPUTE stream afterwards: the
    host waits until all ranks involved have posted their part, never for the device. Dtypes that
    NCCL cannot sum are staged, and so are messages to more peers than the GPU has room for.
    Coordination messages are sent by a host transport between the same ranks.

    References:
        NCCL's documentation, "Types", "Point-to-point communication" and "Using multiple NCCL
        communicators concurrently"; cupy's, ``cupy.cuda.nccl.NcclCommunicator``.
    """

    name = "nccl"
    serves_collectives = True

    def __init__(
        self,
        base: Transport,
        streams: DeviceStreams,
        bindings: CupyBindings,
        communicator: NCCLCommunicator,
        message_transport: Transport,
        budget: threading.Semaphore,
    ) -> None:
        super().__init__(base, streams)
        self._bindings, self._budget = bindings, budget
        self.collectives = NCCLCollectives(streams, bindings.nccl, communicator, message_transport)
        self.pairs = NCCLPointToPoint(
            base.rank, streams, bindings, message_transport, budget, self._stage
        )
        self._timeout = _OPEN_TIMEOUT

    @staticmethod
    @override
    def detect(facts: DeviceCapabilities) -> DeviceCapabilities:
        cupy, nccl = versions()
        host, shares = gpu_sharing_settings(nccl)
        found = replace(facts, cupy=cupy, nccl=nccl, nccl_host=host, nccl_shares_gpu=shares)
        return replace(found, doubt=describe_conflict(nccl))

    @staticmethod
    @override
    def doubt(facts: DeviceCapabilities) -> str:
        return facts.doubt

    @staticmethod
    @override
    def obstacle(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
        if where := ranks_without(lambda facts: facts.cupy is not None, one, other):
            return f"{where} cannot import cupy: {install_command('cuda12', 'cuda13')}"
        if where := ranks_without(lambda facts: (facts.nccl or 0) >= _MIN_VERSION, one, other):
            return f"cupy finds no NCCL of at least 2.7 at {where}"
        if one.nccl != other.nccl:
            return f"rank {one.rank} has NCCL {one.nccl}, rank {other.rank} has {other.nccl}"
        shared = one.gpu == other.gpu != "" and one.nccl_host == other.nccl_host
        if shared and not (one.nccl_shares_gpu and other.nccl_shares_gpu):
            return f"rank {one.rank} and rank {other.rank} share one GPU, which NCCL refuses"
        return unknown_gpu(one, other)

    @classmethod
    def open(
        cls,
        base: Transport,
        streams: DeviceStreams,
        reachable: Collection[int],
        timeout: float,
        bindings: CupyBindings | None = None,
        budget: threading.Semaphore | None = None,
    ) -> NCCLTransport:
        """Open the transport, with a communicator of all ranks of ``base``; collective.

        Raises an EnvironmentProblem if NCCL fails, and a WaitTimeoutError if ranks are missing.
        """
        own, problem = bytes(_ID_BYTES), "the first rank has made no unique id of NCCL"
        has_messages = any(gather_records(base, bool(reachable), bool, timeout))
        try:
            if bindings is None:
                if has_messages:  # torch's own NCCL has these limits as well
                    limit_channels()
                bindings = library()
            own = create_unique_id(bindings.nccl) if base.rank == 0 else own
        except Exception as error:  # noqa: BLE001 - told below, where no peer waits for this rank
            problem = str(error)
        shared = from_bytes(own, torch.uint8, (_ID_BYTES,))
        base.broadcast(shared, 0, timeout)
        unique_id, deadline = bytes(shared.tolist()), time.monotonic() + timeout
        with ExitStack() as undo:
            message_transport = base.split(0, base.rank)
            undo.callback(message_transport.close)
            if bindings is None or not any(unique_id):
                raise EnvironmentProblem(f"rank {base.rank}: {problem}")
            arguments = bindings, streams, base.size, unique_id, base.rank
            communicator = _open_by(
                deadline, base, streams, partial(NCCLCommunicator.open, *arguments)
            )
            undo.callback(communicator.abort, "its ranks did not connect")
            budget = communicator_budget(streams.device) if budget is None else budget
            transport = cls(base, streams, bindings, communicator, message_transport, budget)
            _open_by(deadline, base, streams, partial(transport._connect, timeout))
            undo.pop_all()
        return transport

    def _connect(self, timeout: float) -> NCCLCommunicator:
        self.finish(self.collectives.warm_up(), timeout, "the first collectives of NCCL")
        return self.collectives.communicator

    def for_subgroup(self, base: Transport, timeout: float = _OPEN_TIMEOUT) -> NCCLTransport:
        """Open the transport for a subgroup, with its own communicator; collective in it."""
        shared = self._bindings, self._budget
        return NCCLTransport.open(base, self.streams, (), timeout, *shared)

    # work of the device that no request waits for any more

    @override
    def watch(self, timeout: float) -> bool:
        """Advance all messages; return whether posted work is still running on the device.

        After ``timeout`` the communicator is aborted: later calls raise an error with the reason.
        """
        super().watch(timeout)
        self._timeout = min(timeout, _OPEN_TIMEOUT)
        messages = self.pairs.watch(timeout)
        return self.collectives.communicator.watch(timeout) or messages

    @override
    def finish(self, request: Request, timeout: float, what: str) -> None:
        """Wait until a request has completed, and the device has ended all posted work."""
        super().finish(request, timeout, what)
        while self.watch(timeout):
            self.backoff(0)
        self.collectives.raise_if_failed()

    def free(self) -> None:
        """Free all communicators after the device has ended its work, or after the deadline."""
        while self.watch(self._timeout):
            self.backoff(0)
        self.pairs.close()
        run_in_threads([self.collectives.communicator.closer()], self.streams)

    def close(self) -> None:
        """Free all communicators, and close the host transports."""
        self.free()
        super().close()

    # messages

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        """Start to send from the tensor's memory, once the peer has posted its receive."""
        if peer == self.rank:
            return super().isend(data, peer, tag)
        return self.pairs.begin(data, peer, tag, sends=True)

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        """Start to receive into the tensor's memory; data for a host tensor are discarded."""
        if peer == self.rank:
            return super().irecv(out, peer, tag)
        return self.pairs.begin(out, peer, tag, sends=False)

    def _stage(self, data: torch.Tensor, peer: int, tag: int, sends: bool) -> Request:
        return super().isend(data, peer, tag) if sends else super().irecv(data, peer, tag)

    # collectives

    def iallreduce(
        self, tensor: torch.Tensor, out: torch.Tensor | None = None, divisor: int | None = None
    ) -> Request:
        """Start an ``ncclAllReduce``; stage dtypes and averages that NCCL does not support."""
        if not has_sum(tensor.dtype) or (divisor is not None and rounds(tensor.dtype)):
            return super().iallreduce(tensor, out, divisor)
        into = tensor if out is None else out
        return self.collectives.reduce("allreduce", tensor, into, divisor)

    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Request:
        """Start an ``ncclReduceScatter``; stage dtypes and averages that NCCL does not support."""
        if not has_sum(tensor.dtype) or (divisor is not None and rounds(tensor.dtype)):
            return super().ireduce_scatter(tensor, out, divisor)
        return self.collectives.reduce("reduce_scatter", tensor, out, divisor)

    connect = forward_to("pairs", Transport.connect)
    ibroadcast = forward_to("collectives", Transport.ibroadcast)
    iallgather = forward_to("collectives", Transport.iallgather)


def _open_by(
    deadline: float, base: Transport, streams: DeviceStreams, make: Callable[[], NCCLCommunicator]
) -> NCCLCommunicator:
    """Open a communicator in a thread, since NCCL waits for other ranks; raise its error."""
    opening, what = open_in_thread(make, streams), f"communicator of {base.size} ranks"
    if not wait([opening], max(0.0, deadline - time.monotonic())).done:
        abort_when_open(opening)
        late = "was not open in time: not all of them have come"
        raise WaitTimeoutError(f"rank {base.rank}: NCCL's {what} {late}")
    if problem := opening.exception():
        text = f"NCCL makes no {what} ({problem}); NCCL_DEBUG=WARN has it say more"
        raise EnvironmentProblem(f"rank {base.rank}: {text}") from problem
    return opening.result()
