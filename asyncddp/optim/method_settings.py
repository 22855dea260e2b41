"""Settings of a training algorithm, and the construction of its communication phase."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from typing_extensions import Self

from asyncddp.algorithms import ALGORITHMS, Algorithm, AveragedQuantity
from asyncddp.algorithms.compression_rules import compressor_of, warn_of_cost
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.phases import (
    CommunicationPhase,
    PhaseConfig,
    check_update_in_backward,
    phase_for,
)
from asyncddp.algorithms.training_tracer import NullTrainingTracer
from asyncddp.algorithms.wrapper_setup import (
    checked_bucket_bytes,
    checked_integer,
    next_label,
    require_equal_setup,
)
from asyncddp.compression import Compressor
from asyncddp.context import Context
from asyncddp.context.mesh_context import inner_context
from asyncddp.errors import ArgumentError
from asyncddp.optim.autotune import Autotune
from asyncddp.optim.distributed_optimizer_arguments import (
    checked_communication_buffer,
    checked_flag,
    checked_prefix,
    checked_scale_steps,
    checked_staleness,
    describe_settings,
)
from asyncddp.optim.parameter_sync import broadcast_start, starting_tensors
from asyncddp.registry import nearest
from asyncddp.topology.builders import TopologyLike


@dataclass(frozen=True)
class MethodSettings:
    """Settings of a training algorithm, named as the arguments of ``DistributedOptimizer``.

    Attributes:
        options: Options of the method itself.
    """

    algorithm: str | type[Algorithm]
    communication: str | None = None
    topology: TopologyLike | None = None
    num_steps_per_communication: int = 1
    bucket_size_in_mb: float = 25
    update_in_backward: bool = False
    max_staleness: int | None = None
    window_prefix: str | None = None
    scale_steps: bool | None = None
    compression: str | Compressor | None = None
    error_feedback: bool | None = None
    plain_compression: bool = False
    communication_buffer_in_mb: float | None = None
    force: bool = False
    autotune: Autotune | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, algorithm: str | type[Algorithm], arguments: Mapping[str, Any]) -> Self:
        """Split keyword arguments into the wrapper's settings and the method's options."""
        names = {one.name for one in fields(cls)} - {"algorithm", "options"}
        known = {name: value for name, value in arguments.items() if name in names}
        own = {name: value for name, value in arguments.items() if name not in names}
        return cls(algorithm, options=own, **known)

    def is_plain(self, algorithm: str) -> bool:
        """Return whether it is the algorithm with defaults for all that affects its steps."""
        plain = MethodSettings(
            algorithm,
            topology=self.topology,
            bucket_size_in_mb=self.bucket_size_in_mb,
            communication_buffer_in_mb=self.communication_buffer_in_mb,
            autotune=self.autotune,
        )
        return self == plain

    def arguments(self) -> dict[str, Any]:
        """Return the settings as keyword arguments for ``DistributedOptimizer``."""
        names = [one.name for one in fields(self) if one.name != "options"]
        return {**{name: getattr(self, name) for name in names}, **self.options}

    def create_method(self) -> Algorithm:
        """Create the method with its options.

        Raises:
            UnknownNameError: No method has the name.
            ArgumentError: It has no such option, or the option cannot have that value.
        """
        kind = self._method_type()
        parameters = inspect.signature(kind).parameters
        for name in self.options:
            if name == "communication_interval" and name not in parameters:
                raise ArgumentError(
                    f"argument {name}: it counts steps of the optimizer, H, and belongs to methods "
                    f"with rounds of H steps, such as local_sgd; {kind.name} takes "
                    "num_steps_per_communication, which counts backward passes, J"
                )
            if name not in parameters:
                known = [*parameters, *(one.name for one in fields(self) if one.name != "options")]
                raise ArgumentError(
                    f"argument {name}: {kind.name} has no such option; known are: "
                    f"{', '.join(known)}.{nearest(name, known)}"
                )
        return kind(**self.options)

    @property
    def method_name(self) -> str:
        """Name of the method."""
        return self._method_type().name

    def _method_type(self) -> type[Algorithm]:
        algorithm: Any = self.algorithm
        if isinstance(algorithm, str):
            return ALGORITHMS[algorithm]
        if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
            return algorithm
        raise ArgumentError(
            f"argument algorithm: expected one of {', '.join(ALGORITHMS)}, or a subclass of "
            f"asyncddp.algorithms.Algorithm, got {algorithm!r}"
        )

    def before(self, method: Algorithm) -> MethodSettings:
        """Return the settings for a method's warm-up."""
        return replace(
            self,
            algorithm=method.warmup_algorithm,
            communication="empty" if self.communication == "empty" else None,
            compression=None,
            error_feedback=None,
            communication_buffer_in_mb=None,
            options={},
        )

    def describe(self, without: Collection[str] = ()) -> str:
        """Describe non-default settings, without the topology and the given names."""
        given = [
            f"{one.name}={getattr(self, one.name)!r}"
            for one in fields(self)
            if one.name not in ("algorithm", "topology", "options", *without)
            and getattr(self, one.name) != one.default
        ]
        own = [f"{name}={value!r}" for name, value in sorted(self.options.items())]
        return ", ".join([str(self.algorithm), *own, *given])

    def create_averager(self, context: Context, method: Algorithm, label: str) -> ModelAverager:
        """Create the averager, after checking the method's settings against each other."""
        _check_for_parts(context, self)
        averager = ModelAverager(
            context,
            method,
            self.communication,
            self.topology,
            label,
            self.compressor_for(method),
            force=checked_flag("force", self.force),
        )
        megabytes = self.communication_buffer_in_mb
        averager.communication_buffer = checked_communication_buffer(megabytes, averager)
        averager.max_staleness = checked_staleness(self.max_staleness, method)
        averager.windows.scales_steps = checked_scale_steps(self.scale_steps, method)
        return averager

    def build_phase(
        self,
        context: Context,
        method: Algorithm,
        optimizer: torch.optim.Optimizer,
        models: Sequence[torch.nn.Module],
        tracer: NullTrainingTracer,
        wrapper: str,
        *,
        broadcast: bool = False,
    ) -> CommunicationPhase:
        """Check all settings for consistency on all ranks, and build the phase.

        Collective.

        Args:
            context: The world.
            method: What :meth:`create_method` gave.
            optimizer: The optimizer whose parameters or gradients it averages.
            models: The models that own the parameters.
            tracer: Tracer of the training loop.
            wrapper: Name of the wrapper, for labels and errors.
            broadcast: Whether all ranks begin with rank 0's parameters and buffers.
        """
        method.check_optimizer(optimizer)
        label = checked_prefix(self.window_prefix, method) or next_label(context, wrapper)
        counts_steps = method.communication_interval is not None
        config = PhaseConfig(
            self.create_averager(context, method, label),
            optimizer,
            models,
            passes_per_round=self.steps_per_round(method),
            counts_steps=counts_steps,
            first_round_at_once=counts_steps and method.averages_first_step,
            bucket_bytes=checked_bucket_bytes(self.bucket_size_in_mb),
            training_tracer=tracer,
        )
        if method.what is AveragedQuantity.GRADIENT and context.size > 1 and context.rank == 0:
            options = {key for group in optimizer.param_groups for key, one in group.items() if one}
            warn_of_cost(f"{label}: {method.name}", config.averager.compressor, options)
        return self._create_phase(config, wrapper, broadcast=broadcast and context.size > 1)

    def _create_phase(
        self, config: PhaseConfig, wrapper: str, *, broadcast: bool = False
    ) -> CommunicationPhase:
        settings = describe_settings(config, self.update_in_backward)
        settings += [f"autotune={self.autotune!r}", f"broadcast={broadcast}"]
        named = config.optimizer_parameters()
        parameters = (one for group in config.optimizer.param_groups for one in group["params"])
        sent = starting_tensors(config.models, parameters) if broadcast else {}
        require_equal_setup(config.averager, wrapper, settings, named, sent)
        broadcast_start(sent.values())
        return phase_for(config, update_in_backward=self.update_in_backward)

    def rebuild_phase(
        self, phase: CommunicationPhase, before: MethodSettings, wrapper: str
    ) -> CommunicationPhase:
        """Build a phase that takes over averager and counters of an ended phase.

        Collective. Settings of the same method, which may differ in bucket size, communication,
        compression and ``update_in_backward``; what they share stays as the user has set it since.

        Args:
            phase: The phase that has ended.
            before: Its settings.
            wrapper: Name of the wrapper, for errors.
        """
        averager = phase.config.averager
        if self.communication is not None and self.communication != before.communication:
            averager.set_communication(self.communication)
        compressor = self.compressor_for(averager.algorithm)
        if compressor != averager.compressor:
            averager.compressor = compressor
            for bucket in averager.buckets:
                bucket.compressor = None  # whose state is of no use to another one
        size = checked_bucket_bytes(self.bucket_size_in_mb)
        rebuilt = self._create_phase(replace(phase.config, bucket_bytes=size), wrapper)
        rebuilt.accumulation = phase.accumulation
        return rebuilt

    def compressor_for(self, method: Algorithm) -> Compressor | None:
        """Return the compressor of the buckets, or None.

        Raises:
            UnknownNameError: No compressor has that name.
            ArgumentError: The method cannot use it.
        """
        return compressor_of(
            method,
            self.compression,
            self.error_feedback,
            plain_compression=self.plain_compression,
        )

    def check(self, context: Context, optimizer: torch.optim.Optimizer) -> Algorithm:
        """Run this rank's checks of :meth:`build_phase`; return the method."""
        method = self.create_method()
        method.check_optimizer(optimizer)
        checked_prefix(self.window_prefix, method)
        self.create_averager(context, method, method.name)
        self.steps_per_round(method)
        checked_bucket_bytes(self.bucket_size_in_mb)
        check_update_in_backward(method, update_in_backward=self.update_in_backward)
        return method

    def steps_per_round(self, method: Algorithm) -> int:
        """Return the number of steps per averaging round.

        Raises:
            ArgumentError: The number is none, or given twice.
        """
        steps = checked_integer(
            "argument num_steps_per_communication", self.num_steps_per_communication, 1
        )
        interval = method.communication_interval
        if interval is None:
            return steps
        if steps != 1:
            raise ArgumentError(
                f"argument num_steps_per_communication: it counts backward passes, J, and "
                f"{method.name} takes communication_interval, which counts steps of the optimizer, "
                f"H, here {interval}; expected 1, got {steps}"
            )
        return checked_integer("argument communication_interval", interval, 1)


def set_gradient_meaning(
    method: Algorithm, optimizer: torch.optim.Optimizer, *, averages: bool
) -> None:
    """Tell an optimizer that accepts momentum as gradients whether it gets momentum.

    Args:
        method: The method in use.
        optimizer: Optimizer; its groups may have ``grad_holds_momentum``.
        averages: Whether there are other ranks to average momentum with.
    """
    holds = averages and method.what is AveragedQuantity.MOMENTUM
    for options in (optimizer.defaults, *optimizer.param_groups):
        if "grad_holds_momentum" in options:
            options["grad_holds_momentum"] = holds


def _check_for_parts(context: Context, settings: MethodSettings) -> None:
    """Raise an error for settings by which the parts of one replica could decide differently."""
    if inner_context(context) is None:
        return
    if settings.autotune:
        raise ArgumentError(
            "argument autotune: with mesh each column would choose for itself, by times of its "
            "own; expected None, and a bucket_size_in_mb by hand"
        )
    if settings.options.get("sync_interval_ms"):
        raise ArgumentError(
            "argument sync_interval_ms: with mesh each column would average by a clock of its own; "
            "expected None, and num_steps_per_communication, which counts steps"
        )
