"""Base class of module wrappers that can switch, pause and save their algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncddp.algorithms import Algorithm
from asyncddp.algorithms.phases.optimizer_buckets import BucketUpdateConfig
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError
from asyncddp.optim.algorithm_switch import require_equal_switch
from asyncddp.optim.autotuner import Autotuner
from asyncddp.optim.method_settings import MethodSettings
from asyncddp.optim.replica_synchronization import unify_replicas
from asyncddp.parallel.bucket_optimizer_state import check_state, restore_state
from asyncddp.parallel.module_wrapper import AveragedModelAccess
from asyncddp.parallel.reducer import AlgorithmReducer


class SwitchableModule(AveragedModelAccess):
    """Base class of module wrappers that can switch, pause and save their algorithm."""

    _config: BucketUpdateConfig

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        optimizer = self._reducer.optimizer
        return "adapt_with_combine" if optimizer is None else optimizer.algorithm

    @property
    def autotune(self) -> Autotuner | None:
        """Autotuner that searches for the fastest settings (see its ``result``), or None."""
        optimizer = self._reducer.optimizer
        return None if optimizer is None else optimizer.autotune

    def switch_to(
        self, algorithm: str | type[Algorithm], *, replicas: str = "average", **arguments: Any
    ) -> None:
        """Switch to another algorithm from the next backward pass on; collective.

        Args:
            algorithm: As for :meth:`asyncddp.DistributedOptimizer.switch_to`.
            replicas: Treatment of models that differ: ``"average"``, ``"rank0"`` or ``"keep"``.
            **arguments: Options of the algorithm, and of the optimizer wrapper.

        Raises:
            UsageError: After :meth:`close`.
            ArgumentError: An argument is invalid.
            MismatchError: Ranks pass different arguments, or call it after different steps.

        Example:
            >>> import asyncddp as bf, torch
            >>> def train():
            ...     sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=0.0)
            ...     ddp = bf.DecentralizedDataParallel(torch.nn.Linear(1, 1), sgd)
            ...     ddp.switch_to("bytegrad")
            ...     ddp(torch.ones(1, 1)).sum().backward()
            ...     return ddp.algorithm
            >>> with bf.local_world(2) as world:
            ...     world.run(train)
            ['bytegrad', 'bytegrad']
        """
        self._require_open("switch_to")
        self._restore_own()
        before = self._reducer
        before.end_failed_step()
        if before.optimizer is not None:
            before.optimizer.switch_to(algorithm, replicas=replicas, **arguments)
            return
        megabytes = self._config.bucket_bytes / 2**20
        settings = MethodSettings.of(algorithm, {"bucket_size_in_mb": megabytes, **arguments})
        averager, named = before.averager, before.named_parameters
        optimizer = self._config.optim_fn(list(named))
        require_equal_switch(
            averager.context, optimizer, averager.algorithm, settings, replicas, before.steps
        )
        state = before.state
        before.conclude()
        before.detach()
        before.close()
        with use(averager.context):
            unify_replicas([self.module], replicas)
            self._reducer = AlgorithmReducer(
                self.module, named, settings, self._config, steps=before.steps
            )
        restore_state(self._reducer.buckets[0], state)
        self._reducer.averager.continue_totals(averager)
        self._reducer.observer, self._reducer.training = before.observer, before.training
        self._reducer.accumulate(before.accumulating)

    def abort(self) -> None:
        """Stop averaging at time intervals, as :meth:`asyncddp.DistributedOptimizer.abort` does."""
        if self._reducer.optimizer is not None:
            self._reducer.optimizer.abort()

    def resume(self) -> None:
        """Restart averaging at time intervals after :meth:`abort`."""
        if self._reducer.optimizer is not None:
            self._reducer.optimizer.resume()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state into the model; all ranks call it after the same step.

        Pending averages are dropped, and the next backward pass sends their tensors again: a run
        resumed with this and :meth:`load_optim_state_dict` continues as if never interrupted.

        Args:
            state_dict: State that ``state_dict()`` of this or of the plain model returned; each
                rank loads its own.
            strict: As in ``torch.nn.Module.load_state_dict``.
            assign: Must be False: parameters keep their memory.

        Raises:
            ArgumentError: ``assign`` is True.
        """
        if assign:
            raise ArgumentError(
                "load_state_dict: argument assign: expected False, since parameters live in "
                "buckets, got True; load into the model before DecentralizedDataParallel gets it"
            )
        self._reducer.end_failed_step()
        self._reducer.wait_for_reads()
        self._backup = None
        found = self.module.load_state_dict(state_dict, strict)
        self._reducer.restart(averaged=False)
        return found

    def optim_state_dict(self) -> dict[str, Any]:
        """Return the step and the state of all optimizers and schedulers, keyed by parameter name.

        The state does not depend on the buckets, so that a run may continue with different ones.
        As with torch's optimizers, it refers to the tensors in use: save or copy it before the
        next step.
        """
        return self._reducer.state

    def load_optim_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that :meth:`optim_state_dict` returned; call it between two steps.

        Args:
            state_dict: This rank's own; all ranks load one.

        Raises:
            ArgumentError: The argument is no such state, or is of another model.
        """
        check_state(state_dict, [name for name, _ in self._reducer.named_parameters])
        self._reducer.end_failed_step()
        self._reducer.load_state(state_dict)
