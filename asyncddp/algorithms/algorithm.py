"""Base class of training algorithms, with everything that an algorithm declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import (
    AveragedQuantity,
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
    JoinedRanks,
)
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.compression import Compressor
from asyncddp.errors import ArgumentError
from asyncddp.topology import GraphOrSchedule, Schedule, as_schedule


class Algorithm:
    r"""Base class of training algorithms: declares which tensors ranks average, when and how.

    A method is one class in one file and one line in the registry. The library moves tensors as
    the data says; the method knows nothing of models, threads or transports. With W the mixing
    matrix of the round, and Q the compressor, if there is one, the two hooks compute

    .. math:: z_i = \mathrm{outgoing}(x_i, s_i), \qquad
              (x_i, s_i) \leftarrow
              \mathrm{incoming}\Big(x_i, s_i, \sum_j w_{ij} Q(z_j)\Big)

    for each flat bucket x, with s the state that the method keeps for it. With one-sided
    communication the :math:`z_j` of neighbours are the latest that arrived. Tensors of
    :meth:`travelling_state` travel along, so that a method can average several quantities in one
    round: :math:`\sum_j w_{ij} s_j` of each is in ``received.states``. What :meth:`takes_part`
    leaves out is not sent in that round.

    Around each update of the user's optimizer, whether a round follows or not,
    :meth:`before_update` may replace the gradient that the optimizer sees, and :meth:`after_step`
    sees what has become of the parameters. Hooks change nothing but their bucket, and treat each
    element by itself, so that a bucket may as well stack the models of many ranks.

    A method's options are the keyword arguments of its constructor; where a default depends on
    them, such as the communication, the constructor sets the attribute.

    Other distributions add methods under the entry-point group ``asyncddp.algorithms``; the
    conformance tests run over the registry and hold each method to what it declares.

    Attributes:
        name: Name in the registry and the literature.
        what: Which tensors are averaged; parameters unless a method says otherwise.
        when: At which points of a step.
        how: Communication patterns that it allows; the first is the default.
        needs: Properties that the topology must have; others are refused.
        alternative: Name of a method that works on any doubly stochastic graph, where this one is
            refused for another reason.
        exact: Whether the ranks reach the optimum of the average loss with a constant step size
            though their data differ (with full gradients and a small enough step size); not
            unless a method says so.
        default_graph: Makes the topology of n nodes that it uses unless the user gives one; None
            for the context's.
        zero_state: Names of tensors of a bucket's state that are zero at first.
        parameter_state: Names of those that are the parameters at first.
        averaged_state: Names of tensors of a bucket's state that each round averages as well.
        state_copies: Tensors of a bucket's size that a rank keeps: what a method costs in memory.
        state_copies_per_neighbor: Those that it keeps for each neighbour in addition.
        messages: Tensors of a bucket's size that a round sends to each neighbour, unless
            :meth:`messages_of` says otherwise.
        by_neighbor: Whether its hooks look at what single neighbours have sent, or keep something
            for each; where models of many ranks are stacked, they are called rank by rank.
        owns_momentum: Whether it keeps momentum itself, so that the optimizer must have none.
        changes_alone: Whether a rank that averages with nobody trains otherwise than the plain
            optimizer, as with momentum of the method's own: it then has rounds by itself.
        joined_ranks: What ranks that are done, within ``join``, do in rounds of the others.
        scales_steps: Whether updates are scaled, unless the user says otherwise, so that ranks of
            different speeds count equally, where else the optimum is weighted by step rates; None
            where they need no scale.
        counts_puts: Whether, in rounds through windows by puts, the weight of a neighbour is
            multiplied by how often it has put a tensor since this rank's last round, and all
            weights are divided by their sum.
        compression: What compression does to it.
        default_compression: Name of the compressor that it uses unless the user names another;
            None for none.
        default_communication: Name of the communication that it uses unless the user names
            another; None for the first of ``how``.
        communication_interval: H, steps of the optimizer from one averaging to the next; None
            leaves it to ``num_steps_per_communication``, J, which counts backward passes.
        fragments: Number of parts of consecutive parameters, of about equal size, of which each
            bucket has parameters of one; see ``bucket.fragment``.
        delay: Steps for which a round may last, with ``AFTER_STEP``: :meth:`incoming` is called at
            the end of so many steps after that in which it began, or before, if the state is to be
            saved. So it leaves the parameters alone, and :meth:`after_step` changes them where
            ``bucket.steps`` says that it is time; and :meth:`outgoing` gives a new tensor.
        hidden_rounds: Whether each round is followed by another one that lasts until the next round
            begins, with ``AFTER_STEP``: what it sends travels during the steps in between. Rounds
            of even index then block, and odd ones are hidden; :meth:`incoming` of these leaves the
            parameters alone, and :meth:`outgoing` gives what does not change meanwhile.
        averages_first_step: Whether, with such an interval, the first step averages, or the last
            one of the interval.
        max_staleness: How many steps a neighbour may lag before a rank waits for it, unless the
            user says otherwise; None for any number.
        average: Whether a global exchange gives the average over ranks, or their sum.
        warmup_algorithm: Name of the method that trains during its warm-up.
        rounds_momentum: Name of the option that is the momentum from one round to the next; None
            for a method without any.

    Example:
        >>> class Damped(Algorithm):
        ...     "Move halfway to the neighbours' average."
        ...
        ...     name, exact = "damped", False
        ...     when = CommunicationTiming.AFTER_STEP
        ...     how = (CommunicationPattern.NEIGHBORS,)
        ...     needs = TopologyRequirements(doubly_stochastic=True)
        ...
        ...     def incoming(self, bucket, received):
        ...         bucket.flat.lerp_(received.mixed, 0.5)
    """

    name: ClassVar[str]
    what: ClassVar[AveragedQuantity] = AveragedQuantity.PARAMETER
    when: CommunicationTiming
    how: tuple[CommunicationPattern, ...]
    needs: TopologyRequirements = TopologyRequirements()
    alternative: ClassVar[str | None] = None
    exact: ClassVar[bool] = False
    default_graph: ClassVar[Callable[[int], GraphOrSchedule] | None] = None
    zero_state: ClassVar[tuple[str, ...]] = ()
    parameter_state: ClassVar[tuple[str, ...]] = ()
    averaged_state: ClassVar[tuple[str, ...]] = ()
    state_copies: int = 0
    state_copies_per_neighbor: ClassVar[int] = 0
    messages: ClassVar[int] = 1
    by_neighbor: ClassVar[bool] = False
    owns_momentum: ClassVar[bool] = False
    changes_alone: ClassVar[bool] = False
    joined_ranks: ClassVar[JoinedRanks] = JoinedRanks.LEAVE
    scales_steps: ClassVar[bool | None] = None
    counts_puts: ClassVar[bool] = False
    compression: ClassVar[CompressionUse] = CompressionUse.PERTURBS
    default_compression: ClassVar[str | None] = None
    default_communication: str | None = None
    communication_interval: int | None = None
    fragments: int = 1
    delay: int = 0
    hidden_rounds: ClassVar[bool] = False
    averages_first_step: ClassVar[bool] = True
    max_staleness: int | None = None
    average: bool = True
    warmup_algorithm: ClassVar[str] = "gradient_allreduce"
    rounds_momentum: ClassVar[str | None] = None

    @property
    def replicates_model(self) -> bool:
        """True if all ranks hold equal parameters after each step, as they did before it."""
        return self.what is not AveragedQuantity.PARAMETER

    @property
    def plain(self) -> bool:
        """True if no hook of a round is overridden, so that the average replaces the bucket."""
        own = type(self)
        overridden = own.outgoing, own.incoming, own.takes_part
        plain = Algorithm.outgoing, Algorithm.incoming, Algorithm.takes_part
        return overridden == plain and not self.averaged_state

    @property
    def replaces_gradients(self) -> bool:
        """True if the method has a hook before the optimizer's update."""
        return type(self).before_update is not Algorithm.before_update

    def messages_of(self, shape: Sequence[int]) -> float:
        """Return the mean number of tensors of a parameter's size that a round sends per neighbour.

        Args:
            shape: Shape of the parameter.
        """
        return self.messages

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise an ArgumentError if the method does not work with an optimizer."""
        groups = optimizer.param_groups
        found = next((group["momentum"] for group in groups if group.get("momentum")), None)
        if self.owns_momentum and found is not None:
            raise ArgumentError(
                f"argument optimizer: {self.name} keeps the momentum itself, which would count "
                f"twice; expected one without, got momentum={found}; give it to the method, as "
                f"beta={found}"
            )

    def warms_up(self, optimizer: torch.optim.Optimizer, steps: int) -> bool:
        """Return whether the next step is part of the warm-up; ``steps`` were made before it."""
        return False

    def check_compressor(self, compressor: Compressor) -> None:
        """Raise an ArgumentError if the method does not converge with a compressor."""

    def default_topology(self, nodes: int) -> GraphOrSchedule | None:
        """Return the method's default topology; None to use the context's."""
        graph = type(self).default_graph
        return None if graph is None else graph(nodes)

    def schedule_along(self, given: GraphOrSchedule) -> Schedule:
        """Return the schedule of rounds for a topology; may set coefficients that depend on it."""
        return as_schedule(given)

    def initial_state(
        self, bucket: AveragedBucket, neighbors: NeighborTensors
    ) -> Mapping[str, torch.Tensor]:
        """Make the initial state of a bucket.

        Tensors as ``bucket.new_state()`` makes them, by the names that the method declares.

        Args:
            bucket: The bucket, whose ``state`` is empty.
            neighbors: Exchanges tensors of ``flat``'s layout with neighbours, and returns those
                of the in-neighbours by rank; all ranks must call it equally often, with
                ``by_neighbor``.
        """
        copies = {key: bucket.new_state().copy_(bucket.flat) for key in self.parameter_state}
        return {**copies, **{key: bucket.new_state() for key in self.zero_state}}

    def before_update(self, bucket: AveragedBucket) -> None:
        """Prepare the optimizer's update of a bucket; may replace ``bucket.gradient()``.

        Called in each step just before the user's optimizer, when gradients are unscaled and
        clipped; not in a step that a GradScaler skips.
        """

    def takes_part(self, bucket: AveragedBucket) -> bool:
        """Return whether a bucket is sent in round ``bucket.round``; the same on all ranks."""
        return True

    def averages_all(self, number: int) -> bool:
        """Return whether round ``number`` averages over all ranks instead of with neighbours."""
        return False

    def travelling_state(self, bucket: AveragedBucket) -> Mapping[str, torch.Tensor]:
        """Return state tensors that round ``bucket.round`` averages as well, by name.

        The names are the same on all ranks. The tensors are sent uncompressed; each has
        ``bucket.flat``'s size or is one number. Only for methods without
        ``compression = CompressionUse.DIFFERENCES``.
        """
        return {key: bucket.state[key] for key in self.averaged_state}

    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        """Compute the tensor to send for a bucket, which stays unchanged until :meth:`incoming`.

        Returns:
            A tensor of ``bucket.flat``'s size; or several, stacked before its last dimension, which
            are then encoded each by itself, with ``compression = CompressionUse.DIFFERENCES``.
        """
        return bucket.flat

    def outgoing_to_each(
        self, bucket: AveragedBucket, sent: torch.Tensor
    ) -> Mapping[int, torch.Tensor] | None:
        """Compute a tensor per out-neighbour, keyed by rank; None to send the same tensor to all.

        Only for methods with ``compression = CompressionUse.DIFFERENCES`` and no compressor. These
        tensors may have any size that is the same on all ranks; they are not averaged.

        Args:
            bucket: The bucket.
            sent: The result of :meth:`outgoing`, which has the shape of these tensors.
        """
        return None

    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        """Update the bucket and its state from the received average."""
        bucket.flat.copy_(received.mixed)
        for name, mixed in received.states.items():
            bucket.state[name].copy_(mixed)

    def after_step(self, bucket: AveragedBucket) -> None:
        """Update the state of a bucket at the end of a step, after the update and the round."""

    def restart(self, bucket: AveragedBucket, neighbors: NeighborTensors) -> None:
        """Reset state that depends on the set of participating ranks, after this set has changed.

        Called on all ranks before the first round after the set of training ranks has changed
        within ``join``, and at the end of ``join``, with ``bucket.row`` of that round.

        Args:
            bucket: The bucket.
            neighbors: As in :meth:`initial_state`, for the in-neighbours that take part.
        """

    def check(self, graph_or_schedule: GraphOrSchedule) -> None:
        """Raise an error if this algorithm does not work on a graph or schedule.

        Raises:
            TopologyError: It does not fulfil ``needs``; the message names the requirement, and a
                graph that fulfils it.
        """
        self.needs.check(self.name, graph_or_schedule, self.alternative)
