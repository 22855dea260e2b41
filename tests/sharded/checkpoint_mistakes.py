"""Checkpoints of sharded replicas that cannot be saved or loaded, and what stays then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import asyncddp as bf
from tests.sharded.checkpoint_cases import ADAMW, Training, differences, full, run_of
from tests.sharded.tool_cases import refusal
from tests.sharded.training import make_net
from tests.sharded.world import folder_of_all

CASES: dict[str, Callable[[], Any]] = {}
STEP = "step_0000000003"


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def problem(call: Callable[[], Any]) -> str:
    """The kind and the message of the error that a call raises."""
    try:
        call()
    except bf.AsyncDDPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def unchanged(training: Training, call: Callable[[], Any]) -> list[Any]:
    """The error that a call raises, and whether model and optimizer are as before, to the bit."""
    before = training.values()
    told = problem(call)
    return [told, differences(training.values(), before)[0] == 0]


def on_rank_0(action: Callable[[], Any]) -> None:
    if bf.rank() == 0:
        action()
    bf.barrier()


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def names_in(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


# arguments


@case
def arguments() -> dict[str, str]:
    """What a mesh does not go with, without a file being written."""
    folder, training = folder_of_all(), Training("2x2").go(0, 1)
    mesh, whole = training.mesh, make_net()
    plain = ADAMW(training.model.parameters())
    plain.state[next(iter(training.model.parameters()))]["own"] = torch.ones(3)
    told = {
        "no mesh": refusal(lambda: bf.save_checkpoint(folder, training.model, step=1)),
        "load without mesh": refusal(lambda: bf.load_checkpoint(folder, training.model)),
        "whole model": refusal(lambda: bf.save_checkpoint(folder, whole, step=1, mesh=mesh)),
        "load whole model": refusal(lambda: bf.load_checkpoint(folder, whole, mesh=mesh)),
        "wait": refusal(lambda: training.save(folder, wait=False)),
        "two dimensions": refusal(
            lambda: bf.save_checkpoint(folder, training.model, step=1, mesh=training.run.mesh)
        ),
        "ordinary state": refusal(
            lambda: bf.save_checkpoint(folder, training.model, plain, step=1, mesh=mesh)
        ),
    }
    return {**told, "files": ", ".join(names_in(folder))}


@case
def models_that_differ() -> str:
    """Ranks of a replica with other tensors, such as those of a pipeline's stages."""
    training = Training("2x2")
    if training.run.mesh.get_local_rank("shard"):
        training.model.register_buffer("of_this_stage", torch.ones(1))
    return problem(lambda: training.save(folder_of_all(), step=1))


# other checkpoints


@case
def checkpoints_of_others() -> dict[str, list[Any]]:
    """Whole replicas, another model, another method, and a method that keeps parts of ranks."""
    folder, training = folder_of_all(), Training("2x2").go(0, 1)
    whole = make_net()
    with bf.replicas(training.mesh):
        bf.save_checkpoint(folder / "whole", whole, step=1)
    training.save(folder / "sharded")
    other, method = Training("even").go(0, 1), Training("2x2", algorithm="gradient_tracking")
    gossip = {"algorithm": "power_gossip"}
    Training("2x2", **gossip).go(0, 1).save(folder / "gossip", replicas="all")
    tp = Training("tp", **gossip).go(0, 1)
    saved = folder / "sharded"
    return {
        "of whole replicas": unchanged(training, lambda: training.load(folder / "whole")),
        "of sharded ones": [problem(lambda: bf.load_checkpoint(saved, whole)), True],
        "another model": unchanged(other, lambda: other.load(saved)),
        "another method": unchanged(method.go(0, 1), lambda: method.load(saved)),
        "parts of ranks": unchanged(tp, lambda: tp.load(folder / "gossip")),
        "their average": [tp.load(folder / "gossip", replicas="average").step, True],
    }


# files


@case
def damage() -> dict[str, Any]:
    """A flipped bit, a file that is cut or lacks: the one before is loaded, or an error raised."""
    found: dict[str, Any] = {}
    for name, harm in {
        "a bit": lambda step: flip(step / "average" / "__1_0.distcp"),
        "metadata": lambda step: flip(step / "average" / ".metadata"),
        "cut": lambda step: (step / "average" / "__0_0.distcp").write_bytes(b"short"),
        "lacking": lambda step: (step / "average" / "__1_0.distcp").unlink(),
        "no manifest": lambda step: (step / "manifest.json").unlink(),
    }.items():
        folder, training = folder_of_all(), Training("2x2").go(0, 1)
        training.save(folder)
        training.load(folder)
        first = training.values()
        training.go(1, 3).save(folder)
        on_rank_0(partial(harm, folder / STEP))
        told = unchanged(training, partial(training.load, folder, step=3))
        loaded = training.load(folder)
        found[name] = [*told, loaded.step, differences(training.values(), first)[1]]
    return found


@case
def a_disk_that_is_full() -> list[Any]:
    """One rank of a replica cannot write: all raise, and the former checkpoint stays."""
    folder, training = folder_of_all(), Training("2x2").go(0, 1)
    training.save(folder, replicas="all")
    before = names_in(folder)
    write = FileSystemWriter.write_data

    def fail(*args: Any) -> Any:
        if bf.current().rank == 1 and training.run.replica == 1:
            raise OSError(28, "No space left on device")
        return write(*args)

    told = []
    for steps in (3, 1):  # a new step, and one that is there
        FileSystemWriter.write_data = fail
        try:
            told += unchanged(training, partial(training.save, folder, step=steps, replicas="all"))
        finally:
            FileSystemWriter.write_data = write
        told.append(names_in(folder) == before)
    return [*told, training.load(folder).step]


@case
def what_stays() -> dict[str, Any]:
    """``keep`` checkpoints stay, without anything of others; a step may be saved again."""
    folder, training = folder_of_all(), Training("2x2").go(0, 1)
    for step in (1, 2, 3):
        training.save(folder, step=step, keep=2, replicas="all" if step == 2 else "average")
    again = training.go(1, 2).values()
    training.save(folder, step=3, keep=1, replicas="rank0")
    names = names_in(folder)
    other = Training("2x2")
    found = other.load(folder)
    with bf.replicas(training.mesh):
        expected = {name: bf.broadcast(again[name]) for name in sorted(again)}
    return {"names": names, "step": found.step, "bits": differences(other.values(), expected)[0]}


@case
def files_of_torch() -> list[Any]:
    """Each rank writes its parts alone, and torch reads them into a whole model."""
    folder, training = folder_of_all(), Training("2x2").go(0, 3)
    training.save(folder)
    metadata = FileSystemReader(folder / STEP / "average").read_metadata()
    chunks = metadata.state_dict_metadata["model.first.up.weight"].chunks
    whole = make_net()
    state = {"model": whole.state_dict()}
    dcp.load(state, checkpoint_id=folder / STEP / "average")
    with bf.average_model(training.model, mesh=training.mesh):
        expected = {name: full(one) for name, one in training.model.state_dict().items()}
    return [[list(one.sizes) for one in chunks], differences(expected, state["model"])]


@case
def module_wrapper() -> list[float]:
    """A ``DecentralizedDataParallel`` is saved with its optimizers, and goes on exactly."""
    folder, run = folder_of_all(), run_of("2x2")

    def make(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        return ADAMW([one for _, one in named])

    batches = list(run.batches(whole=False))
    made = [run.sharded(), run.sharded()]
    first, second = (
        bf.DecentralizedDataParallel(one, make, mesh=run.replicas, topology="ring") for one in made
    )

    def go(model: Any, pairs: list[Any]) -> None:
        for x, y in pairs:
            (model(x) - y).square().mean().backward()

    go(first, batches[:3])
    bf.save_checkpoint(folder, first, mesh=run.replicas, replicas="all")
    bf.load_checkpoint(folder, second, mesh=run.replicas)
    go(first, batches[3:])
    go(second, batches[3:])
    values = [{name: full(p).detach() for name, p in one.named_parameters()} for one in made]
    return differences(*values)
