"""``step``: the time of a training step with every averaging method."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.machine_info import oversubscribed
from benchmarks.tables import RankGroup, Target, TimingTable
from benchmarks.training_models import convnet, narrow_mlp, transformer
from benchmarks.training_step import ATC, ATC_IN_BACKWARD, AWC, DDP, LOCAL, step_table

__all__ = ["tables"]

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


def tables(world: RankGroup, *, quick: bool) -> Sequence[TimingTable]:
    """The tables of this bench."""
    mlp, conv, former = narrow_mlp(), convnet(), transformer()
    if quick:
        mlp, conv, former = narrow_mlp(4, layers=20), convnet(2, channels=8), transformer(1, 1, 64)
    judged = not oversubscribed(world)  # each on its own core; else computing is slowed down too
    return [
        step_table(world, mlp, (_OVERHEAD,) if judged else ()),
        step_table(world, conv, (_RATE, _QUARTER) if judged else ()),
        step_table(world, former, (_RATE,) if judged else ()),
    ]
