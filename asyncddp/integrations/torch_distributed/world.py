"""World of torch process groups, separate from asyncddp's own; opened once per process."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from asyncddp.config import Config
from asyncddp.context import crash_handler
from asyncddp.context.context import Context, current, in_local_world, is_initialized
from asyncddp.context.world_startup import open_world
from asyncddp.engine.messages import COLLECTIVE
from asyncddp.environments.launchers import launcher_rank_and_size
from asyncddp.errors import ArgumentError, EnvironmentProblem, PeerError
from asyncddp.ops.process_group import ProcessGroup, open_group
from asyncddp.ops.process_group import close_group as close_opened_group
from asyncddp.transport import Transport
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport

_TAGS = 1 << 15
_EXTENSION = "world of torch.distributed"
_DEFAULT = "<collective of the default process group>"


class TorchWorld:
    """World of torch process groups on this rank: transport of all ranks, and default group.

    Args:
        every: Transport between all ranks of MPI.
        config: Settings of the transport.
    """

    process: TorchWorld | None = None

    def __init__(self, every: Transport, config: Config) -> None:
        self.every, self._config = every, config
        self.default: ProcessGroup | None = None

    @classmethod
    def open(cls, timeout: float) -> TorchWorld:
        """Return this rank's world; the first call is collective over all ranks and starts MPI.

        Inside :func:`asyncddp.local_world` its ranks are the threads.

        Raises:
            EnvironmentProblem: Launchers contradict each other, or MPI cannot be used here.
            WaitTimeoutError: Some ranks have not come within ``timeout`` seconds.
        """
        if in_local_world():
            context = current()
            if _EXTENSION not in context.extensions:
                world = cls(context.transport, context.config)
                context.extensions[_EXTENSION] = world
            found: TorchWorld = context.extensions[_EXTENSION]
            return found
        if cls.process is None:
            cls.process = cls(*_open_transport(timeout))
        return cls.process

    @classmethod
    def require_default_group(cls, members: int) -> None:
        """Raise an ArgumentError if a group of some ranks is made before one of all ranks."""
        if in_local_world() or (cls.process is not None and cls.process.default is not None):
            return
        size = launcher_rank_and_size()[1]
        if members < size:
            raise ArgumentError(
                f"new_group: got {members} of {size} ranks for the first group of this backend; "
                "expected all: call init_process_group('asyncddp') before, or make a group of all "
                "ranks first, by new_group(backend='asyncddp')"
            )

    def default_group(self, rank: int, size: int, *, on_gpus: bool = True) -> ProcessGroup:
        """Create the group of all ranks, in torch's order, with its own context; collective.

        It serves tensors ``on_gpus`` by what its ranks agree on, unless another backend does.

        Raises:
            EnvironmentProblem: Torch has another number of ranks than MPI; the message has both.
        """
        if self.every.size != size:
            raise EnvironmentProblem(
                f"init_process_group: torch's world has {size} ranks (argument world_size or "
                f"WORLD_SIZE), but MPI's has {self.every.size}: the two contradict each other. "
                "Leave world_size away, unset WORLD_SIZE, or start as many ranks by MPI"
            )
        timeline = None if is_initialized() else self._config.timeline  # which the library writes
        config = replace(self._config, timeline=timeline)
        if not on_gpus:
            config = replace(config, device_transports=CudaStagedTransport.name)
        context = Context(self.every.split(0, rank), config)
        slots = context.engine.matcher.slots
        if COLLECTIVE in slots:
            slots[_DEFAULT] = slots.pop(COLLECTIVE)
        self.default = ProcessGroup(range(size), context, _DEFAULT, context.transport)
        return self.default

    def part(
        self, ranks: Sequence[int], place: int, name: str, *, on_gpus: bool = True
    ) -> ProcessGroup:
        """Create a group of some ranks of the default group; collective over these ranks.

        Raises:
            EnvironmentProblem: The default group is another backend's, and these are not all ranks.
        """
        if self.default is None:
            return self.default_group(place, len(ranks), on_gpus=on_gpus)
        match_name = f"<collective of process group {name!r}>"
        tag = zlib.crc32(name.encode()) % _TAGS
        return open_group(self.default.context, tuple(ranks), match_name, tag)


def close_group(group: ProcessGroup, why: str) -> None:
    """Close the transport of a group; for the default group, close its whole context."""
    if group.match_name != _DEFAULT:
        close_opened_group(group)
        return
    with suppress(PeerError):  # of an operation that had ended here
        group.context.close(why)


def _open_transport(timeout: float) -> tuple[Transport, Config]:
    config = Config.from_environment(timeout=timeout)
    if launcher_rank_and_size()[1] > 1 and sys.excepthook is sys.__excepthook__:
        crash_handler.install_crash_handler()  # an error on one rank ends the others, too
    return open_world(config), config
