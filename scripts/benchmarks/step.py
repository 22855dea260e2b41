"""``step``: the time of a training step with every averaging method."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.machine_info import oversubscribed
from benchmarks.tables import RankGroup, Target, TimingTable
from benchmarks.training_models import benched_models
from benchmarks.training_step import ATC, ATC_IN_BACKWARD, AWC, DDP, LOCAL, all_methods, step_table

_ONE_PEER = (ATC, AWC, ATC_IN_BACKWARD)
_OVERHEAD = Target(ATC, 0.5, DDP, beyond=LOCAL, words="overhead ≤ 0.5 x that of DDP gloo")
_RATE = Target(
    _ONE_PEER,
    1 / 1.1,
    DDP,
    words="fastest with one peer: samples/s ≥ 1.1 x DDP gloo",
    told=lambda ratio: f"{1 / ratio:.3g} x",
)
_QUARTER = Target(
    _ONE_PEER,
    1.25,
    LOCAL,
    words="fastest with one peer: overhead ≤ 25% of the local step",
    told=lambda ratio: f"{ratio - 1:.0%}",
)
_AIMS = ((_OVERHEAD,), (_RATE, _QUARTER), (_RATE,))
"""Of each model."""
_NOTE = (
    "million parameters in float32, SGD with momentum. Before the clock starts each method makes a "
    "step that does not count, so that what reaches over from step to step is paid for."
)


def tables(world: RankGroup, *, quick: bool) -> Sequence[TimingTable]:
    """The tables of this bench."""
    judged = not oversubscribed(world)  # each on its own core; else computing is slowed down too
    return [
        step_table(
            world,
            one,
            all_methods(world),
            f"step_{one.key}",
            f"a step of {one.title}",
            targets if judged else (),
            note=f"{one.nbytes / 4e6:.3g} {_NOTE}",
        )
        for one, targets in zip(benched_models(quick=quick), _AIMS, strict=True)
    ]
