"""Model averager: begins and counts the averaging rounds of one wrapped optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.algorithms.rounds import COMMUNICATIONS
from asyncddp.algorithms.rounds.averaging_round import AveragerState, AveragingRound, LocalRound
from asyncddp.algorithms.rounds.round_memory_limit import RoundMemoryLimit
from asyncddp.compression import Compressor
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError
from asyncddp.ops.allreduce import allreduce
from asyncddp.ops.inner_mesh import InnerMesh
from asyncddp.tensors.allocation import detached_copy, make_tensor
from asyncddp.tensors.buckets import ALIGNMENT, TensorFactory
from asyncddp.topology import GraphOrSchedule, Schedule, TopologyError, as_schedule, describe
from asyncddp.topology.builders import TopologyLike, topology_for


class ModelAverager(AveragerState):
    """Averager of one optimizer's parameters or gradients with other ranks, in rounds.

    Args:
        context: The world.
        algorithm: The algorithm, against which communication and topology are checked.
        communication: Name of a communication; None for the first that the algorithm allows.
        topology: Graph or schedule, a function that makes it, or its name; None for the method's
            own, or else the context's, read in every round.
        label: Prefix of the names of the messages; equal on all ranks.
        compressor: Compressor of the buckets; None sends them as they are.
        force: Whether any topology will do, whatever the algorithm needs.

    Attributes:
        communication_buffer: Limit in bytes for messages in flight and ring buffers; None for the
            default.
        inner: The ranks of this replica, where replicas are sharded; else None.
        used: Names of parameters that have had a gradient, where buckets are compressed.
        agreed_used: Those that have had one on any rank, as all ranks have agreed.
        lent: Number of active blocks that show other values in the parameters; no round may average
            these.
    """

    communication: type[AveragingRound]
    lent = 0

    def __init__(
        self,
        context: Context,
        algorithm: Algorithm,
        communication: str | None,
        topology: TopologyLike | None,
        label: str,
        compressor: Compressor | None = None,
        *,
        force: bool = False,
    ) -> None:
        super().__init__(context, algorithm, label)
        self.force = force
        self.compressor = compressor
        self.communication_buffer: int | None = None
        self._checked_topology: GraphOrSchedule | None = None
        self._schedule: Schedule | None = None
        self.used: set[str] = set()
        self.agreed_used: set[str] = set()
        self._left_out: dict[str, dict[str, torch.Tensor]] = {}
        """The method's state for parameters that are in no bucket for now."""
        self._loaded_compressors: list[tuple[list[str], dict[str, Any]]] = []
        self._given = topology
        self.inner = InnerMesh.of(context)
        self.set_communication(communication)

    @property
    def single_rank(self) -> bool:
        """True if the world has one rank, so that nothing is ever sent."""
        return self.context.size == 1

    @property
    def idle(self) -> bool:
        """True if there are no rounds, since a single rank trains like the plain optimizer."""
        return self.single_rank and not self.algorithm.changes_alone

    @property
    def tensor_factory(self) -> TensorFactory | None:
        """Factory for buckets in shared memory; None for ordinary memory."""
        group = self.context.transport.shared_memory_group
        return None if group is None else group.arena.empty

    @property
    def splits_buckets(self) -> bool:
        """True if buckets can be sent in pieces: averaged with neighbours, without compression."""
        method = self.algorithm
        neighbors = CommunicationPattern.NEIGHBORS in method.how
        return method.plain and neighbors and self.compressor is None

    def choose_pieces(self, sizes: Sequence[int], *, on_host: bool) -> int:
        """Choose the piece size for sending buckets; return the alignment of buckets.

        Args:
            sizes: Bytes of the buckets.
            on_host: Whether all are in the host's memory.
        """
        self.buffer = self.piece_bytes = None
        if self.splits_buckets and (on_host or self.communication_buffer is not None):
            self.buffer = RoundMemoryLimit.of(self.context, self.communication_buffer)
        if self.buffer is not None:
            self.piece_bytes = self.buffer.piece_bytes(sizes)
        return self.piece_bytes or ALIGNMENT

    @property
    def step_scale(self) -> float:
        """Factor for the optimizer's updates that gives ranks of different speed equal weight."""
        rates = self.windows.step_rates
        if rates is None or self.force_barrier:
            return 1.0
        return rates.scale if self.inner is None else self.inner.mean(rates.scale)

    def average_scalar(self, value: Any) -> Any:
        """Average a scalar over all ranks, if the communication is global."""
        if self.single_rank or self.communication.how is not CommunicationPattern.GLOBAL:
            return value
        if not isinstance(value, (torch.Tensor, float)):
            return value
        tensor = make_tensor(value, torch.float64) if isinstance(value, float) else value.detach()
        with use(self.context):
            coordinator = self.join_coordinator
            if coordinator is None:
                mean = allreduce(tensor)
            else:
                mean = coordinator.average_loss(self.label, tensor)
        if self.inner is not None:
            mean = mean.new_tensor(self.inner.mean(float(mean)))
        return mean if isinstance(value, torch.Tensor) else float(mean)

    def set_communication(self, name: str | None) -> None:
        """Switch to another communication from the next round on; None for the method's default."""
        self.communication = communication_for(self.algorithm, name)
        self._checked_topology = self._schedule = None
        self.topology = self._own_or_given(self._given)
        if self._given is not None and self.topology is not None:
            self._check_topology(self.topology)

    def set_topology(self, topology: TopologyLike | None) -> None:
        """Switch to another topology for later rounds; None for the default."""
        chosen = self._own_or_given(topology)
        given = self.topology_in_use(chosen)
        if given is not None:
            self._check_topology(given)
        self._given, self.topology = topology, chosen

    def _own_or_given(self, topology: TopologyLike | None) -> GraphOrSchedule | None:
        """Return the given topology, or the method's own for ranks or machines, or None."""
        if topology is not None:
            return topology_for(topology, self._nodes)
        none = self.communication.nodes is None
        return None if none else self.algorithm.default_topology(self._nodes)

    @property
    def _nodes(self) -> int:
        """Number of nodes (ranks or machines) that average."""
        machines = self.communication.nodes == "machines"
        return self.context.machine_size if machines else self.context.size

    def topology_in_use(self, topology: GraphOrSchedule | None) -> GraphOrSchedule | None:
        """Return a given topology, or the context's, which may be None."""
        topologies, nodes = self.context.topologies, self.communication.nodes
        if topology is not None or nodes is None:
            return topology
        return topologies.given if nodes == "ranks" else topologies.machine_given

    def set_buckets(
        self, buckets: Sequence[AveragedBucket], left_out: Collection[str] = ()
    ) -> None:
        """Set the buckets that rounds average; collective if there are windows or replicas.

        The method's state of the same parameters is carried over from earlier buckets, and kept for
        parameters that are left out for now.
        """
        if self.idle:
            return
        for bucket in buckets:
            bucket.method = self.algorithm.name
            if self.compressor is not None and bucket.flat.is_complex():
                raise ArgumentError(
                    f"{bucket.method}: parameter {bucket.names[0]} is {bucket.flat.dtype}; "
                    "expected a real one, as what it sends is compressed. Train its "
                    "torch.view_as_real, or use algorithm='adapt_with_combine'"
                )
        before, self.buckets = self.state_dict(), buckets
        before["compressors"] = [*self._loaded_compressors, *before["compressors"]]
        self._left_out = {
            name: {key: detached_copy(one) for key, one in state.items()}
            for name, state in before["parameters"].items()
            if name in left_out
        }
        self.windows.set_buckets(buckets)
        if self.communication.asynchronous and not self.single_rank:
            self._choose_schedule()
            self.communication.prepare(self)
        self.begin_state()
        self._load(before)

    def begin_state(self) -> None:
        """Initialise the state of method and compressors from the buckets; collective."""
        for bucket in self.buckets:
            bucket.rank, bucket.nodes = self.context.rank, self._nodes
            if self.compressor is not None:
                seed = self.context.rank + bucket.index * self.context.size
                bucket.compressor = TensorCompressor(self.compressor, seed)
            exchange = partial(self._tensors_of_first_round, bucket)
            neighbors = NeighborTensors(bucket, exchange)
            bucket.state.update(self.algorithm.initial_state(bucket, neighbors))

    def _tensors_of_first_round(
        self, bucket: AveragedBucket, tensor: torch.Tensor
    ) -> Mapping[int, torch.Tensor]:
        """Exchange a bucket's tensor with neighbours uncompressed; return theirs by rank."""
        self._choose_schedule()
        bucket.row = self.communication.row_of_round(self, self.round)
        return self.tensors_of_neighbors(bucket, tensor)

    def state_dict(self) -> dict[str, Any]:
        """Return views of the method's state by parameter and of the compressors' by bucket."""
        saved = [bucket.state_dict() for bucket in self.buckets]
        held = {k: v for one in saved for k, v in one["parameters"].items() if v}
        found: dict[str, Any] = {
            "parameters": {**self._left_out, **held},
            "compressors": [
                (bucket.names, one["compressor"])
                for bucket, one in zip(self.buckets, saved, strict=True)
                if "compressor" in one
            ],
        }
        if self.used:
            found |= {"used": sorted(self.used), "agreed_used": sorted(self.agreed_used)}
        return found

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` gave.

        Compressors of buckets with other parameters are reset: a residual is lost once.
        """
        self._load(saved)
        self._loaded_compressors = [*saved["compressors"]]  # of buckets that may be made anew

    def _load(self, saved: Mapping[str, Any]) -> None:
        compressors = [(list(names), state) for names, state in saved["compressors"]]
        self._left_out |= {k: v for k, v in saved["parameters"].items() if k in self._left_out}
        self.used |= {*saved.get("used", ())}
        self.agreed_used |= {*saved.get("agreed_used", ())}
        for bucket in self.buckets:
            own = {"parameters": saved["parameters"]}
            for names, state in compressors:
                if names == bucket.names:
                    own["compressor"] = state
            bucket.load_state_dict(own)

    def begin_round(self, ahead: int = 0) -> AveragingRound | None:
        """Begin a round while ``ahead`` rounds are incomplete; None if there are no rounds."""
        if self.idle:
            return None
        self.number_buckets(self.round + ahead)
        if self.single_rank:
            return LocalRound.begin(self, self.round + ahead)
        self.context.engine.ensure_open(self.label)
        self._choose_schedule()
        return self.communication.begin(self, self.round + ahead)

    def _choose_schedule(self) -> None:
        """Choose the averager's own topology or the context's, and check it."""
        overrides = self.communication.relevant_overrides(self.overrides)
        if not any(value is not None for value in overrides.values()):
            given = self.topology_in_use(self.topology)
            if given is not None and given is not self._checked_topology:
                self._check_topology(given)
        self.schedule = None if self.topology is None else self._schedule
        self.source = self._draw_default if self._given is None else self._given

    def _draw_default(self, nodes: int) -> GraphOrSchedule:
        """Return the method's own topology for a number of nodes."""
        chosen = self.algorithm.default_topology(nodes)
        assert chosen is not None  # else there is no schedule that needs a source
        return chosen

    def _check_topology(self, given: GraphOrSchedule) -> None:
        """Check a topology against ranks and algorithm, and compute its schedule of rounds."""
        nodes = self.communication.nodes
        if nodes is None:
            return
        schedule = as_schedule(given)
        if schedule.n != self._nodes:
            raise TopologyError(
                f"argument topology: {describe(given)} has {schedule.n} nodes, but "
                f"{self.communication.name} averages among {self._nodes} {nodes} here; build it "
                f"with n={self._nodes}"
            )
        if not self.force:
            self.algorithm.check(given)
        self._checked_topology, self._schedule = given, self.algorithm.schedule_along(given)


def communication_for(method: Algorithm, name: str | None) -> type[AveragingRound]:
    """Return the round class of a communication's name; None for the method's default.

    Raises:
        UnknownNameError: There is none of that name.
        ArgumentError: The method does not allow it.
    """
    if name is None:
        name = method.default_communication or _communications_with(method.how[:1])[0]
    chosen = COMMUNICATIONS[name]
    if chosen.how is not None and chosen.how not in method.how:
        raise ArgumentError(
            f"argument communication: {method.name} works with "
            f"{', '.join([*_communications_with(method.how), 'empty'])}, got {name!r}"
        )
    return chosen


def _communications_with(patterns: Sequence[CommunicationPattern]) -> list[str]:
    return [name for name in COMMUNICATIONS if COMMUNICATIONS[name].how in patterns]
