"""The MPI world behind process groups, apart from the library's own: opened once per process."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence

from asyncddp.config import Config
from asyncddp.context import crash_handler
from asyncddp.context.context import MachineLayout, current, in_local_world
from asyncddp.context.world_startup import open_world
from asyncddp.environments.launchers import launcher_rank_and_size
from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.transport import Transport
from asyncddp.transport.cuda.negotiation import negotiate_from_config

_TAGS = 1 << 15
_EXTENSION = "world of torch.distributed"


class TorchWorld:
    """Transports of this rank: between all ranks of MPI, and that of torch's default group.

    Args:
        every: Between all ranks of MPI.
        config: Its settings.
        machines: Which of its ranks are on which machine.
    """

    process: TorchWorld | None = None

    def __init__(self, every: Transport, config: Config, machines: MachineLayout) -> None:
        self.every, self._config, self._machines = every, config, machines
        self.default: Transport | None = None

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
                world = cls(context.transport, context.config, context.machines)
                context.extensions[_EXTENSION] = world
            found: TorchWorld = context.extensions[_EXTENSION]
            return found
        if cls.process is None:
            cls.process = cls(*_open_transport(timeout))
        return cls.process

    @classmethod
    def require_default_group(cls, members: int) -> None:
        """Raise an ArgumentError for a group of some ranks that has none of all to come from."""
        if in_local_world() or (cls.process is not None and cls.process.default is not None):
            return
        size = launcher_rank_and_size()[1]
        if members < size:
            raise ArgumentError(
                f"new_group: got {members} of {size} ranks for the first group of this backend; "
                "expected all: call init_process_group('asyncddp') before, or make a group of all "
                "ranks first, by new_group(backend='asyncddp')"
            )

    def default_group(self, rank: int, size: int, *, on_gpus: bool = True) -> Transport:
        """Make the transport of the group of all ranks, numbered as torch does; collective.

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
        self.default = self._prepared(self.every.split(0, rank), on_gpus=on_gpus)
        return self.default

    def part(
        self, ranks: Sequence[int], place: int, name: str, *, on_gpus: bool = True
    ) -> Transport:
        """Make the transport of some ranks of the default group; collective over these alone.

        Raises:
            EnvironmentProblem: The default group is another backend's, and these are not all ranks.
        """
        if self.default is None:
            return self.default_group(place, len(ranks), on_gpus=on_gpus)
        transport = self.default.split_members(ranks, zlib.crc32(name.encode()) % _TAGS)
        return self._prepared(transport, on_gpus=on_gpus)

    def _prepared(self, transport: Transport, *, on_gpus: bool) -> Transport:
        """Let a new transport's ranks agree on one for tensors on GPUs; collective."""
        transport.machine_id()  # tells it which peers are near; collective
        transport.device_watches, machines = [], self._machines
        if on_gpus:
            negotiate_from_config(
                transport,
                self._config,
                machine=machines.machine_of(self.every.rank),
                rank_on_host=machines.rank_on_host,
                all_see_gpus=machines.all_see_gpus,
            )
        return transport


def _open_transport(timeout: float) -> tuple[Transport, Config, MachineLayout]:
    config = Config.from_environment(timeout=timeout)
    if launcher_rank_and_size()[1] > 1 and sys.excepthook is sys.__excepthook__:
        crash_handler.install_crash_handler()  # an error on one rank ends the others, too
    opened = open_world(config)
    return opened, config, MachineLayout.of(opened, config)
