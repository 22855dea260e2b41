"""Base class of the hooks' state objects: process group, exchanges in flight, checkpointing."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from asyncddp.device.cuda_streams import private_stream
from asyncddp.engine import Steps
from asyncddp.errors import ArgumentError
from asyncddp.hooks.process_group_exchanges import PendingBucketExchange, ProcessGroupExchanges
from asyncddp.hooks.registration import (
    USER_ERRORS,
    agree_on_settings,
    check_device,
    require_ddp,
)

logger = logging.getLogger("asyncddp")
_OF_THIS_PROCESS = ("_group", "_device", "_positions", "_exchanges", "_stream")


class HookState(ABC):
    """Base class of the state objects with which communication hooks are registered.

    All ranks of the module's process group create it together and compare its settings. It uses
    that group alone: ``asyncddp.init()`` need not be called.

    A pickled state has neither group nor module; call :meth:`bind` before it is registered.

    Args:
        module: The DistributedDataParallel on which the hook is to be registered.
        prepare: Function that sets the state's attributes; its exceptions are reported to all
            ranks.

    Attributes:
        replicas_differ: Whether ranks have different parameters with this hook. DDP's broadcast of
            rank 0's buffers in each forward pass is then turned off.

    Raises:
        ArgumentError: The module is none, or is on a device that its group does not serve.
        MismatchError: The settings of two ranks differ, or another rank found a mistake.
    """

    replicas_differ: ClassVar[bool] = False

    def __init__(self, module: torch.nn.Module, prepare: Callable[[], None]) -> None:
        self.step = 0
        self._bind(module, prepare)

    def bind(self, module: torch.nn.Module) -> None:
        """Bind the state to a module's process group; collective over its ranks."""
        self._bind(module, lambda: None)

    def _bind(self, module: torch.nn.Module, prepare: Callable[[], None]) -> None:
        """Bind the state to a module; ``prepare`` sets its attributes, and raises errors."""
        name = type(self).__name__
        ddp = require_ddp(name, module)
        group: dist.ProcessGroup = ddp.process_group
        parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        device = parameters[0].device
        mistake = None
        try:
            check_device(name, group, device)
            prepare()
            self._check(dist.get_world_size(group))
        except USER_ERRORS as error:
            mistake = error
        settings = f"{name}({self._settings()})" if mistake is None else ""
        agree_on_settings(group, device, settings, mistake)
        self._group: dist.ProcessGroup | None = group
        self._device = device
        self._positions = {id(p): place for place, p in enumerate(parameters)}
        self._exchanges: deque[PendingBucketExchange[Any]] = deque()
        self._stream: torch.cuda.Stream | None = None
        if self.replicas_differ:
            self._keep_buffers_apart(ddp)

    def _keep_buffers_apart(self, ddp: torch.nn.parallel.DistributedDataParallel) -> None:
        """Turn off DDP's broadcast of buffers, and log that replicas differ."""
        had_buffers = ddp.broadcast_buffers and any(True for _ in ddp.module.buffers())
        ddp.broadcast_buffers = False
        if dist.get_rank(self.group) == 0:
            logger.log(
                logging.WARNING if had_buffers else logging.INFO,
                "%s lets the replicas of DistributedDataParallel differ: each rank has parameters "
                "of its own%s. Average them before you evaluate or save one model",
                type(self).__name__,
                ", and buffers, whose broadcast is off now" if had_buffers else "",
            )

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the module.

        Raises:
            ArgumentError: The state was unpickled, and not bound to a module since.
        """
        if self.__dict__.get("_group") is None:
            raise ArgumentError(
                f"{type(self).__name__}: it was unpickled, and has no process group; call "
                "state.bind(ddp) on all ranks before ddp.register_comm_hook(state, ...)"
            )
        assert self._group is not None
        return self._group

    @abstractmethod
    def _settings(self) -> str:
        """Return the settings that must be equal on all ranks, as text."""

    def _check(self, size: int) -> None:  # noqa: B027 - most fit any group
        """Raise an error unless the settings fit a process group of this size."""

    def _begin(
        self,
        verb: str,
        bucket: GradBucket,
        steps: Callable[[ProcessGroupExchanges], Steps[torch.Tensor]],
        finish: Callable[[torch.Tensor], None],
    ) -> None:
        """Begin a bucket's exchange, and advance each earlier exchange to its next messages.

        On a device all steps are queued at once, in a separate stream.
        """
        index, device = bucket.index(), bucket.buffer().device
        operation = ProcessGroupExchanges(self.group, device, verb, index, self.step)
        if index == 0:
            self._exchanges.clear()  # of a backward pass that failed
        with torch.no_grad(), self._stream_of(device):
            exchange = PendingBucketExchange(operation, steps(operation), finish)
            if device.type == "cuda":
                while not exchange.advance():
                    pass
                return
            for earlier in [*self._exchanges]:
                if earlier.advance():
                    self._exchanges.remove(earlier)
            if not exchange.advance():
                self._exchanges.append(exchange)

    def _drain(self) -> None:
        """Wait for all exchanges, and advance them in turn."""
        with torch.no_grad():
            while self._exchanges:
                if self._exchanges[0].advance():
                    self._exchanges.popleft()
                else:
                    self._exchanges.rotate(-1)

    def _stream_of(self, device: torch.device) -> Any:
        """Return a context that queues work on a private stream, after the current stream."""
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = private_stream(device)  # it waits for other ranks
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later steps depend on, for a checkpoint of this rank."""
        return {"step": self.step}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the state that :meth:`state_dict` returned on this rank."""
        self.step = int(saved["step"])

    def __getstate__(self) -> dict[str, Any]:
        return {name: one for name, one in vars(self).items() if name not in _OF_THIS_PROCESS}
