"""Checkpoints of the Trainer: whose model they hold, and how exactly a fit goes on from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncddp as bf
from tests.lightning.training import shares, trainer
from tests.support import World, on, open_transport

pytestmark = pytest.mark.training


def make(folder: str, epochs: int, algorithm: str, policy: str, **options: Any) -> Any:
    """A Trainer that saves after each epoch."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from asyncddp.integrations.lightning import AsyncDDPStrategy

    return trainer(
        AsyncDDPStrategy(algorithm, replicas=policy, **options),
        max_epochs=epochs,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
    )


def holds(folder: str, policy: str) -> None:
    from tests.lightning.modules import Regression

    model = Regression()
    trained = make(folder, 1, "adapt_then_combine", policy, communication="empty")
    trained.fit(model, shares())
    saved = torch.load(f"{folder}/last.ckpt", weights_only=True)
    with bf.average_model(model):
        mean = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = {name: bf.broadcast(tensor, 0) for name, tensor in model.state_dict().items()}
    assert not torch.equal(mean["net.0.weight"], first["net.0.weight"])
    torch.testing.assert_close(saved["state_dict"], first if policy == "rank0" else mean)
    key = saved["asyncddp"]
    assert (key["world_size"], key["replicas"]) == (bf.size(), policy)
    own = Path(f"{folder}/last.ckpt.rank{bf.rank()}")
    assert own.exists() == (policy == "all")
    bf.barrier()
    trained.save_checkpoint(f"{folder}/after.ckpt")
    after = torch.load(f"{folder}/after.ckpt", weights_only=True)
    torch.testing.assert_close(after["state_dict"], saved["state_dict"])
    momentum = after["optimizer_states"][0]["state"][0]["momentum_buffer"]
    own_momentum = trained.optimizers[0].state_dict()["state"][0]["momentum_buffer"]
    expected = bf.broadcast(own_momentum, 0) if policy == "rank0" else bf.allreduce(own_momentum)
    torch.testing.assert_close(momentum, expected)


def saves(folder: str) -> None:
    from tests.lightning.modules import Regression

    make(folder, 1, "adapt_with_combine", "all").fit(Regression(), shares())


def begins_from(folder: str) -> torch.Tensor:
    """The model that a resumed fit begins with."""
    from lightning.pytorch.callbacks import Callback

    from asyncddp.integrations.lightning import AsyncDDPStrategy
    from tests.lightning.modules import Regression

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            found.append(pl_module.net[0].weight.detach().clone())

    found: list[torch.Tensor] = []
    resumed = trainer(AsyncDDPStrategy("adapt_with_combine", replicas="all"), callbacks=[Look()])
    resumed.fit(Regression(), shares(), ckpt_path=f"{folder}/last.ckpt")
    return found[0]


@on("mpi-2")
@pytest.mark.parametrize("policy", ["average", "rank0", "all"])
def test_a_checkpoint_holds_what_was_asked_for(world: World, tmp_path: Path, policy: str) -> None:
    """Model and momentum, in files that weights_only reads; also saved after the fit."""
    world.run(holds, str(tmp_path), policy)


class Stream:
    """A loader that goes on where it was; ranks begin at places of their own."""

    def __init__(self) -> None:
        self.place, self.begun_at = 100 * bf.rank(), -1

    def __iter__(self) -> Iterator[Any]:
        for batch in shares():
            self.place += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The place."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place, and remember it."""
        self.place = self.begun_at = state["place"]


def goes_on_whole(folder: str) -> list[Any]:
    """What module, loader and callback of a resumed fit go on from."""
    from lightning.pytorch.callbacks import Callback

    from asyncddp.integrations.lightning import AsyncDDPStrategy
    from tests.lightning.modules import Remembering

    class Counter(Callback):
        def __init__(self, count: int) -> None:
            self.count = count

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    def fit(count: int, stream: Stream, steps: int, **options: Any) -> list[Any]:
        model, counter = Remembering(), Counter(count)
        strategy = AsyncDDPStrategy("adapt_with_combine", replicas="all")
        fitted = trainer(strategy, max_epochs=-1, max_steps=steps, callbacks=[counter])
        if options:
            model.own = -1
        fitted.fit(model, stream, **options)
        fitted.save_checkpoint(f"{folder}/whole.ckpt")
        return [model.own, counter.count, stream.place]

    made, again = fit(20 + bf.rank(), Stream(), 3), Stream()
    found = fit(-1, again, 5, ckpt_path=f"{folder}/whole.ckpt")
    own = torch.load(f"{folder}/whole.ckpt.rank{bf.rank()}", weights_only=True)
    assert {"epoch", "loops", "callbacks", "lr_schedulers", "state_dict", "own"} <= own.keys()
    return [*found[:2], again.begun_at - made[2]]


@on("mpi-2")
def test_a_rank_goes_on_from_all_that_it_had(world: World, tmp_path: Path) -> None:
    """Its module's, callbacks' and loaders' states are its own, not rank 0's."""
    found = world.run(goes_on_whole, str(tmp_path))
    assert found == [[10, 20, 0], [11, 21, 0]]


def best_of(folder: str, policy: str) -> tuple[str, list[str]]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from asyncddp.integrations.lightning import AsyncDDPStrategy
    from tests.lightning.modules import Uneven

    kept = ModelCheckpoint(folder, "{epoch}-{error:.2f}", monitor="error", save_top_k=2)
    options = {"max_epochs": 4, "enable_checkpointing": True, "callbacks": [kept]}
    fitted = trainer(AsyncDDPStrategy(replicas=policy), **options)
    fitted.fit(Uneven(sync=False), shares(), shares())
    bf.barrier()
    for path in kept.best_k_models:
        assert Path(path).exists(), path
        assert Path(f"{path}.rank{bf.rank()}").exists() == (policy == "all")
    saved = torch.load(kept.best_model_path, weights_only=True)["callbacks"]
    (state,) = [one for one in saved.values() if "best_model_path" in one]
    assert state["best_model_path"] == kept.best_model_path
    known = kept.best_model_path, sorted(kept.best_k_models)
    fitted.test(ckpt_path="best", dataloaders=shares(), verbose=False)
    return known


@on("mpi-2")
@pytest.mark.parametrize("policy", ["average", "all"])
def test_all_ranks_know_the_files_that_are_there(world: World, tmp_path: Path, policy: str) -> None:
    """Also where each finds another figure, which gives names and order: rank 0's count."""
    first, other = world.run(best_of, str(tmp_path), policy)
    assert first == other
    shared = sorted(str(one) for one in tmp_path.iterdir() if one.suffix == ".ckpt")
    assert first[1] == shared


@on("mpi-4")
def test_another_number_of_ranks_begins_from_the_average(world: World, tmp_path: Path) -> None:
    """Four ranks save, two go on."""
    folder = str(tmp_path)
    world.run(saves, folder)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    with open_transport("mpi-2", frameworks=True) as two:
        found = two.run(begins_from, folder)
    for weight in found:
        assert torch.equal(weight, saved["net.0.weight"])


@on("mpi-2")
def test_ranks_files_that_are_missing_or_of_another_save(world: World, tmp_path: Path) -> None:
    """All ranks begin from the average."""
    folder = str(tmp_path)
    world.run(saves, folder)
    own = [torch.load(tmp_path / f"last.ckpt.rank{r}", weights_only=True) for r in range(2)]
    before = world.run(begins_from, folder)
    shared = torch.load(tmp_path / "last.ckpt", weights_only=True)
    shared["asyncddp"]["checkpoint"] = "per_rank"  # as files of old have it
    del shared["asyncddp"]["replicas"]
    torch.save(shared, tmp_path / "last.ckpt")
    assert all(map(torch.equal, world.run(begins_from, folder), before))
    for weight, one in zip(before, own, strict=True):
        assert torch.equal(weight, one["state_dict"]["net.0.weight"])
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]["net.0.weight"]
    torch.save({**own[1], "asyncddp": {"id": "of another"}}, tmp_path / "last.ckpt.rank1")
    assert all(torch.equal(one, saved) for one in world.run(begins_from, folder))
    (tmp_path / "last.ckpt.rank1").unlink()
    assert all(torch.equal(one, saved) for one in world.run(begins_from, folder))
