"""``Autotune``: options of the search for an algorithm's fastest settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.compression import Compressor, compressor_for
from asyncddp.errors import ArgumentError

_LEAST_TRIALS = 2


@dataclass(frozen=True, kw_only=True)
class Autotune:
    """Options of autotuning, the search for the settings with the fastest steps.

    Training itself is measured, from the first step on: every few steps all ranks go on by other
    settings, and after the last trial by the fastest. No step is lost. The search is successive
    halving: all candidates get a trial, the better half of them another one, and so on. A trial is
    measured in two parts, the second time in reverse order, so that a machine that gets slower is
    no candidate's fault. Each rank takes the median of its steps, and the slowest rank's counts.

    What is tried gives the same results, but for the order of sums: bucket sizes, from a sixteenth
    of the model to all of it; ``hierarchical_allreduce`` beside ``allreduce``, where several
    machines have several ranks; and with ``update_in_backward=True`` also False. Whatever else may
    change results or what a loop may do is tried only where it is asked for.

    With a compressor that encodes a bucket as a whole, and methods with a rule of their own for
    buckets, their size changes results; so sizes are tried only where they are given. The residual
    of error feedback is lost with each change of buckets or compressor. A change of buckets needs
    memory for a second copy of the parameters for a moment; and the shared memory through which
    neighbours on one machine have read buckets of other sizes stays, at most 256 MiB of a rank.

    Args:
        steps_per_trial: Steps that a trial measures; more where averagings are further apart.
        warmup_steps: Steps after each change that are not measured.
        max_trials: Trials after which the search ends at the latest. Candidates for which they do
            not suffice are left out.
        bucket_sizes_in_mb: Sizes of buckets to try, in MiB, beside that in use; None for powers of
            two, where that changes no results.
        hierarchical: Whether to try ``hierarchical_allreduce``; None where that changes no results,
            True also with compressors.
        update_in_backward: Whether to try it. The loop and the optimizer must be fit for it, as
            :class:`asyncddp.DistributedOptimizer` says: no clipping, GradScaler or closures.
        compressors: Compressors to try beside that in use, or their names; None is the method's
            default. They are compared by their speed alone, not by what they do to the loss.
        path: File on rank 0 for the result, as JSON. If it exists and is of the same model, ranks,
            machines and candidates, it is used and nothing is measured; otherwise it is written.
        show: Whether rank 0 prints a table of what was tried on standard error at the end.

    Raises:
        ArgumentError: A value that cannot be.

    Example:
        >>> import asyncddp as bf, torch
        >>> def train():
        ...     model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
        ...     autotune = bf.Autotune(
        ...         steps_per_trial=4, warmup_steps=1, bucket_sizes_in_mb=[0.01], show=False
        ...     )
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     optimizer = bf.DistributedOptimizer(sgd, model, autotune=autotune)
        ...     while not optimizer.autotune.done:
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 64)).sum().backward()
        ...         optimizer.step()
        ...     return optimizer.autotune.result.setting["bucket_size_in_mb"] in (25, 0.01)
        >>> with bf.local_world(2) as world:
        ...     world.run(train)
        [True, True]

    References:
        Jamieson, Talwalkar, "Non-stochastic best arm identification and hyperparameter
        optimization", AISTATS 2016. Gan et al., "Bagua: scaling up distributed learning with system
        relaxations", VLDB 2021.
    """

    steps_per_trial: int = 20
    warmup_steps: int = 5
    max_trials: int = 32
    bucket_sizes_in_mb: Sequence[float] | None = None
    hierarchical: bool | None = None
    update_in_backward: bool = False
    compressors: Sequence[str | Compressor | None] = ()
    path: str | PathLike[str] | None = field(default=None, repr=False)
    show: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        for name, least in (
            ("steps_per_trial", 1),
            ("warmup_steps", 0),
            ("max_trials", _LEAST_TRIALS),
        ):
            checked_integer(f"Autotune: argument {name}", getattr(self, name), least)
        for name in ("bucket_sizes_in_mb", "compressors"):
            given = getattr(self, name)
            if given is not None and (isinstance(given, str) or not isinstance(given, Sequence)):
                raise ArgumentError(f"Autotune: argument {name}: expected a list, got {given!r}")
        for size in self.bucket_sizes_in_mb or ():
            if not isinstance(size, (int, float)) or not size > 0:
                raise ArgumentError(
                    f"Autotune: argument bucket_sizes_in_mb: expected numbers above 0, got {size!r}"
                )
        for compressor in self.compressors:
            if compressor is not None:
                compressor_for("Autotune", compressor)


def checked_autotune(given: Any) -> Autotune | None:
    """Check the argument autotune: True, False, None, or settings of a search."""
    if given is None or given is False:
        return None
    if given is True:
        return Autotune()
    if not isinstance(given, Autotune):
        raise ArgumentError(
            f"argument autotune: expected True, False, or asyncddp.Autotune(...), got {given!r}"
        )
    return given
