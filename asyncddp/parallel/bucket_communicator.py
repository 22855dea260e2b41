"""Interface of communicators that average a model's buckets with neighbours, and a no-op one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from asyncddp.algorithms import TopologyRequirements
from asyncddp.algorithms.cumulative_timer import CumulativeTimer
from asyncddp.context import Context
from asyncddp.parallel.optimizer_buckets import OptimizerBucket
from asyncddp.tensors.buckets import TensorFactory
from asyncddp.windows import Staleness
from topology import GraphOrSchedule, Schedule, TopologyError, as_schedule, describe

_WHO = "DecentralizedDataParallel"


class BucketCommunicator(ABC):
    """Base class of communicators, which send a model's buckets and average with neighbours.

    A bucket is published after a step, and averaged with the neighbours' before the next update.

    Args:
        context: The world.
        label: Prefix of the names of the messages; equal on all ranks.
        topology: Graph or schedule; None for the context's.

    Attributes:
        buckets: Set by :meth:`register_buckets`.
        bytes_sent: Payload bytes sent to peers so far.
        exposed: The time that steps have spent on sending, waiting and mixing.

    Raises:
        TopologyError: The topology does not fit.
    """

    needs: ClassVar[TopologyRequirements] = TopologyRequirements()
    """Properties that the topology must have."""

    def __init__(self, context: Context, label: str, topology: GraphOrSchedule | None) -> None:
        self.context, self.label = context, label
        self.buckets: Sequence[OptimizerBucket] = ()
        self.bytes_sent, self.exposed_time = 0, CumulativeTimer()
        self._own: Schedule | None = None
        self._context_topology: GraphOrSchedule | None = None
        self.set_topology(topology)

    # the topology

    @property
    def schedule(self) -> Schedule:
        """Return the schedule of the topology in use, after a check.

        Raises:
            TopologyError: The context has a new one that does not fit.
        """
        if self._own is not None:
            return self._own
        given = self.context.topologies.load()
        if given is not self._context_topology:
            self.checked_schedule(given)
            self._context_topology = given
        return self.context.topologies.ranks

    def set_topology(self, topology: GraphOrSchedule | None) -> None:
        """Use another topology for buckets that are published from now on.

        Raises:
            TopologyError: It does not fit.
        """
        chosen = self.checked_schedule(
            self.context.topologies.load() if topology is None else topology
        )
        self._own, self._context_topology = (None if topology is None else chosen), None

    def checked_schedule(self, topology: GraphOrSchedule) -> Schedule:
        """Check a topology, and return its schedule.

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

    def message_name(self, bucket: OptimizerBucket) -> str:
        """Return the name of a bucket in messages."""
        return f"{self.label}.bucket{bucket.index}"

    # the buckets

    @property
    def tensor_factory(self) -> TensorFactory | None:
        """Factory for the buckets' memory; None for ordinary memory."""
        return None

    def register_buckets(self, buckets: Sequence[OptimizerBucket]) -> None:
        """Set the buckets, once all are created; collective."""
        self.buckets = buckets

    @abstractmethod
    def begin_step(self, step: int) -> None:
        """Prepare for the step of a backward pass that has begun."""

    @abstractmethod
    def mix(self, bucket: OptimizerBucket, step: int) -> None:
        """Write the average with the neighbours into a bucket's parameters.

        Args:
            bucket: The bucket.
            step: Steps completed before, which is the round of the topology.

        Raises:
            UsageError: Its parameters were changed from outside.
            PeerError: A neighbour failed, or does something else.
        """

    @abstractmethod
    def publish(self, bucket: OptimizerBucket, step: int) -> None:
        """Publish a bucket's parameters after a step to the neighbours.

        Args:
            bucket: The bucket.
            step: The step in which the neighbours average it.
        """

    @abstractmethod
    def wait_for_reads(self) -> None:
        """Wait until no message or peer reads the buckets; averages are kept for their step."""

    @abstractmethod
    def mix_pending(self, step: int) -> None:
        """Write all pending averages, ahead of their step."""

    @abstractmethod
    def restart(self, *, mixed: bool) -> None:
        """Restart communication after the parameters of all ranks got new values; collective.

        Args:
            mixed: Whether the new values need no averaging in the next step.
        """

    def conclude(self) -> None:  # noqa: B027 - only windows need it
        """Announce that no step follows here for now; a no-op in synchronous communication."""

    def resume(self) -> None:  # noqa: B027
        """Announce that steps follow again."""

    @property
    def departed(self) -> tuple[int, ...]:
        """Neighbours that had departed in the last step, ascending."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""

    def staleness(self) -> dict[int, Staleness]:
        """Return how old the tensors last read of each neighbour are, where that varies."""
        return {}


class NoOpBucketCommunicator(BucketCommunicator):
    """Communicator of a model's buckets that sends nothing, for a world of one rank."""

    def begin_step(self, step: int) -> None:
        """Do nothing, since there is nothing to send."""

    def mix(self, bucket: OptimizerBucket, step: int) -> None:
        """Do nothing, since the average is the bucket itself."""

    def publish(self, bucket: OptimizerBucket, step: int) -> None:
        """Do nothing, since there are no neighbours."""

    def wait_for_reads(self) -> None:
        """Return at once, since no peer reads the buckets."""

    def mix_pending(self, step: int) -> None:
        """Do nothing, since no average is pending."""

    def restart(self, *, mixed: bool) -> None:
        """Do nothing, since no other rank has values."""

    def close(self) -> None:
        """Do nothing, since no resources are held."""
