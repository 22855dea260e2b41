"""Program on every host of ``network-methods``: turns of all methods, then trainings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

import asyncddp as bf
from benchmarks.network.host_ranks import join_hosts
from benchmarks.network.methods.digits_training import DigitsTraining, read_digits
from benchmarks.network.methods.learning_curves import learn as learn_digits
from benchmarks.network.methods.measurements import LearningCurve, MethodTurns
from benchmarks.network.methods.method_names import LOCAL, METHODS, RATE, RATES
from benchmarks.network.methods.method_training import ComparedTraining, prepare
from benchmarks.network.methods.training_turns import measure_turns
from benchmarks.run_header import facts_of_run
from benchmarks.tables import RankGroup, RivalUnavailableError

__all__ = ["main"]

_WARM_UP = 4  # steps, of which the last two are compressed
_TURNS_PLAIN, _LEARNING_PLAIN = 2, 10  # steps before qadam and DDP's PowerSGD compress
_STANDING = 1e-6  # step size of turns, which are not to diverge however many there are


@dataclass
class _Run:
    """What this run's ranks measure, and with what."""

    world: RankGroup
    digits: Any
    accelerator: float
    interface: str
    say: Callable[[str], None]
    names: Sequence[str]
    missing: dict[str, str] = field(default_factory=dict)

    def fresh(self) -> DigitsTraining:
        """A model that nobody has trained, with this rank's images."""
        return DigitsTraining(self.digits, self.world.rank, self.world.size, self.accelerator)

    def trainings(self) -> dict[str, ComparedTraining]:
        """All methods that can run, warmed up."""
        found = {}
        for name in self.names:
            self.say(f"preparing {name}")
            try:
                training = prepare(name, self.fresh(), self.world.gloo, _TURNS_PLAIN, _STANDING)
            except RivalUnavailableError as problem:
                self.missing[name] = str(problem)
                continue
            for _ in range(_WARM_UP):
                training.step()
            training.pause()
            found[name] = training
        return found

    def turns(self, rounds: int, factors: list[float]) -> Iterator[MethodTurns]:
        """Turns of all methods, with the last rank as slow as asked."""
        trainings = self.trainings()
        for slower in factors:
            self.say(f"turns, last rank {slower:g} times slower")
            yield from measure_turns(self.world, trainings, rounds, self.interface, slower)

    def curves(self, turns: list[MethodTurns], most: float) -> Iterator[LearningCurve]:
        """A training of so many seconds at most for what took turns with no rank slowed down."""
        judge = self.fresh()
        for turn in (one for one in turns if one.slower == 1):
            self.say(f"training {turn.name}")
            rate = RATES.get(turn.name, RATE)
            training = prepare(turn.name, self.fresh(), self.world.gloo, _LEARNING_PLAIN, rate)
            step = median(turn.seconds)
            yield learn_digits(self.world, turn.name, training, judge, step, turn.slower, most)


@click.command()
@click.option("--accelerator", type=float, required=True, help="Seconds of a step.")
@click.option("--rounds", type=int, required=True)
@click.option("--slower", type=float, multiple=True, default=(1.0,), help="The last rank, times.")
@click.option("--learn", type=float, default=0.0, help="Also train, so many seconds at most.")
@click.option("--method", "names", multiple=True, default=(LOCAL, *METHODS), help="Only these.")
@click.option("--interface", default="e0")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(
    accelerator: float,
    rounds: int,
    slower: tuple[float, ...],
    learn: float,
    names: tuple[str, ...],
    interface: str,
    out: Path,
) -> None:
    """Measure on this run's ranks; rank 0 writes what was found and says how far it is."""
    torch.set_num_threads(1)
    bf.init()
    world = join_hosts(interface)
    first = world.rank == 0
    digits = bf.broadcast_object(read_digits() if first else None, root_rank=0)
    say = click.echo if first else lambda text: None
    run = _Run(world, digits, accelerator, interface, say, names)
    facts = facts_of_run()
    turns = list(run.turns(rounds, list(slower)))
    curves = list(run.curves(turns, learn)) if learn else []
    if first:
        found = {
            "header": facts,
            "turns": [asdict(one) for one in turns],
            "curves": [asdict(one) for one in curves],
            "missing": run.missing,
        }
        out.write_text(json.dumps(found), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
