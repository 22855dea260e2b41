"""How blocks get from rank to rank: the contract, and what it is for a rank that is alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from asyncddp.algorithms import Needs
from asyncddp.algorithms.stopwatch import Stopwatch
from asyncddp.context import Context
from asyncddp.memory.buckets import Make
from asyncddp.parallel.blocks import Block
from asyncddp.windows import Staleness
from topology import GraphOrSchedule, Schedule, TopologyError, as_schedule, describe

__all__ = ["Alone", "Exchange"]

_WHO = "DecentralizedDataParallel"


class Exchange(ABC):
    """Publishes blocks after a step, and mixes them with the neighbours' before the next one.

    Args:
        context: The world.
        label: Begins the names of the messages; equal on all ranks.
        topology: Graph or schedule; None for the context's.

    Attributes:
        blocks: Set by :meth:`open`.
        bytes_sent: Payload bytes sent to peers so far.
        exposed: The time that steps have spent on sending, waiting and mixing.

    Raises:
        TopologyError: The topology does not fit.
    """

    needs: ClassVar[Needs] = Needs()
    """What is asked of the topology."""

    def __init__(self, context: Context, label: str, topology: GraphOrSchedule | None) -> None:
        self.context, self.label = context, label
        self.blocks: Sequence[Block] = ()
        self.bytes_sent, self.exposed = 0, Stopwatch()
        self._own: Schedule | None = None
        self._inherited: GraphOrSchedule | None = None
        self.choose(topology)

    # the topology

    @property
    def schedule(self) -> Schedule:
        """The topology in use.

        Raises:
            TopologyError: The context has got one that does not fit.
        """
        if self._own is not None:
            return self._own
        given = self.context.topologies.load()
        if given is not self._inherited:
            self.checked(given)
            self._inherited = given
        return self.context.topologies.ranks

    def choose(self, topology: GraphOrSchedule | None) -> None:
        """Take another topology for what is published from now on.

        Raises:
            TopologyError: It does not fit.
        """
        chosen = self.checked(self.context.topologies.load() if topology is None else topology)
        self._own, self._inherited = (None if topology is None else chosen), None

    def checked(self, topology: GraphOrSchedule) -> Schedule:
        """The schedule of a topology.

        Raises:
            TopologyError: It does not fit.
        """
        schedule, size = as_schedule(topology), self.context.size
        if schedule.n != size:
            raise TopologyError(
                f"argument topology: {describe(topology)} has {schedule.n} nodes, but {_WHO} runs "
                f"on {size} ranks here; build it with n={size}"
            )
        self.needs.check(_WHO, topology)
        return schedule

    def name(self, block: Block) -> str:
        """What a block is called in messages."""
        return f"{self.label}.bucket{block.number}"

    # the blocks

    @property
    def make(self) -> Make | None:
        """Makes the memory of blocks, where it is special."""
        return None

    def open(self, blocks: Sequence[Block]) -> None:
        """All blocks are there; collective."""
        self.blocks = blocks

    @abstractmethod
    def begin(self, step: int) -> None:
        """A backward pass has begun."""

    @abstractmethod
    def mix(self, block: Block, step: int) -> None:
        """Put the average with the neighbours in place.

        Args:
            block: The block.
            step: Steps completed before, which is the round of the topology.

        Raises:
            UsageError: Its parameters were changed by somebody else.
            PeerError: A neighbour failed, or does something else.
        """

    @abstractmethod
    def publish(self, block: Block, step: int) -> None:
        """Show the neighbours what a step has made of a block.

        Args:
            block: The block.
            step: The step in which they mix it.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait until nobody reads the blocks; what has come is kept for its step."""

    @abstractmethod
    def finish(self, step: int) -> None:
        """Mix all that is under way, ahead of its step."""

    @abstractmethod
    def renew(self, *, mixed: bool) -> None:
        """The parameters of all ranks have new values; collective.

        Args:
            mixed: Whether they need not be mixed in the step to come.
        """

    def conclude(self) -> None:  # noqa: B027 - only windows need it
        """Say that no step follows here for now; nothing, where neighbours wait for each other."""

    def resume(self) -> None:  # noqa: B027
        """Say that steps follow after all."""

    @property
    def departed(self) -> tuple[int, ...]:
        """Neighbours that had left in the last step, ascending."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    def staleness(self) -> dict[int, Staleness]:
        """How old what was last read of each neighbour is, where that varies."""
        return {}


class Alone(Exchange):
    """Nobody to talk to."""

    def begin(self, step: int) -> None:
        """Nothing to send."""

    def mix(self, block: Block, step: int) -> None:
        """The average is there already."""

    def publish(self, block: Block, step: int) -> None:
        """Nobody looks."""

    def settle(self) -> None:
        """Nobody reads."""

    def finish(self, step: int) -> None:
        """Nothing is under way."""

    def renew(self, *, mixed: bool) -> None:
        """Nobody has other values."""

    def close(self) -> None:
        """Nothing is held."""
