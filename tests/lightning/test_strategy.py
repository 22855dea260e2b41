"""AsyncDDPStrategy on real ranks: every method fits, validates and resumes, as the wrapper does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncddp as bf
from tests.lightning.training import network, shares, trainer
from tests.support import World, on

REPEATABLE: list[tuple[str, dict[str, Any]]] = [
    ("adapt_then_combine", {}),
    ("adapt_with_combine", {}),
    ("bytegrad", {}),
    ("choco_sgd", {"compression": "top_k"}),
    ("decentralized", {"peer_selection_mode": "shift_one"}),
    ("gradient_allreduce", {"compression": "sign"}),
    ("low_precision_decentralized", {}),
    ("qadam", {}),
]
"""Methods whose ranks wait for each other, so that two runs do the same."""
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("async_model_average", {}),
    ("async_model_average", {"sync_interval_ms": 5}),
    ("pull_get", {}),
    ("push_sum", {}),
    ("win_put", {}),
]
pytestmark = pytest.mark.training


def fits_and_resumes(folder: str) -> None:
    """Each method; what repeats goes on to the last bit as a run that was not broken."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    from asyncddp.integrations.lightning import AsyncDDPStrategy
    from tests.lightning.modules import Regression

    for number, (algorithm, options) in enumerate(REPEATABLE + OTHERS):
        there, repeats = f"{folder}/{number}", number < len(REPEATABLE)
        policies = {
            "checkpoint": "per_rank" if repeats else "average",
            "validate": ("average", "local")[number % 2],
        }

        def fit(epochs: int, there: str, **more: Any) -> Any:
            kept = ModelCheckpoint(there, monitor="error", save_last=True)
            trained = trainer(
                AsyncDDPStrategy(algorithm, **policies, **options),  # noqa: B023
                max_epochs=epochs,
                enable_checkpointing=True,
                callbacks=[kept, EarlyStopping("error", patience=9)],
            )
            trained.fit(Regression(algorithm), shares(), shares(), **more)  # noqa: B023
            return trained

        fit(1, there)
        resumed = fit(2, there, ckpt_path=f"{there}/last.ckpt")
        assert resumed.world_size == bf.size()
        batches = len(shares())
        assert resumed.global_step == 2 * batches, algorithm
        assert resumed.strategy.distributed_optimizers[0].steps == 2 * batches, algorithm
        own = resumed.callback_metrics["error"]
        torch.testing.assert_close(bf.allreduce(own), own)
        resumed.test(resumed.lightning_module, shares(), verbose=False)
        if repeats:
            expected = fit(2, f"{there}-unbroken").lightning_module.state_dict()
            for name, found in resumed.lightning_module.state_dict().items():
                assert torch.equal(found, expected[name]), (algorithm, name)


def train_by_wrapper(
    algorithm: str, options: dict[str, Any], merged: int, clip: float | None
) -> torch.nn.Module:
    """Train as the Trainer does, by DistributedOptimizer alone."""
    model = network()
    plain: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if algorithm == "qadam":
        plain = bf.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=3)
    optimizer = bf.DistributedOptimizer(plain, model, algorithm, **options)
    for _ in range(2):
        for x, y in shares(4 * merged):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model


def follows_the_wrapper() -> None:
    """Every method; some with manual optimisation, and with accumulation and clipping."""
    from asyncddp.integrations.lightning import AsyncDDPStrategy
    from tests.lightning.modules import Regression

    automatic, manual, merging = (False, 1, None), (True, 1, None), (False, 2, 0.5)
    for algorithm, options in REPEATABLE:
        kinds = [automatic] if options or algorithm == "qadam" else [automatic, manual, merging]
        for by_hand, merged, clip in kinds:
            model = Regression(algorithm, by_hand=by_hand)
            trained = trainer(
                AsyncDDPStrategy(algorithm, **options),
                accumulate_grad_batches=merged,
                gradient_clip_val=clip,
                use_distributed_sampler=False,
            )
            trained.fit(model, shares())
            expected = train_by_wrapper(algorithm, options, merged, clip).state_dict()
            found = model.net.state_dict()
            torch.testing.assert_close(
                found,
                expected,
                rtol=0,
                atol=1e-6,
                msg=lambda words, name=algorithm: f"{name}: {words}",
            )


def mistakes() -> list[str]:
    """What the user is told."""
    from asyncddp.integrations.lightning import AsyncDDPStrategy

    told = []
    for strategy, flags in (
        ("asyncddp", {"devices": 8}),
        ("asyncddp_bytegrad", {"sync_batchnorm": True}),
        ("asyncddp", {"num_nodes": 3}),
    ):
        with pytest.raises(bf.ArgumentError) as caught:
            trainer(strategy, **flags)
        told.append(str(caught.value))
    for arguments in ({"algorithm": "bytgrad"}, {"checkpoint": "mean"}):
        with pytest.raises(bf.ArgumentError) as caught:
            AsyncDDPStrategy(**arguments)
        told.append(str(caught.value))
    return told


@on("mpi-2")
def test_every_method_fits_validates_and_resumes(world: World, tmp_path: Path) -> None:
    """Steps are counted on, reduced metrics are equal on all ranks."""
    world.run(fits_and_resumes, str(tmp_path))


@on("mpi-2")
def test_the_trajectory_is_the_optimizer_wrapper_s(world: World) -> None:
    """Parameters of each rank agree to 1e-6 after two epochs."""
    world.run(follows_the_wrapper)


@on("mpi-2")
def test_a_contradiction_is_told_with_both_numbers(world: World) -> None:
    """Before training, on each rank."""
    told = world.run(mistakes)[0]
    assert "got 8" in told[0]
    assert "2 of the world's 2 ranks" in told[0]
    assert "SyncBatchNorm of asyncddp.integrations.bagua" in told[1]
    assert "got 3" in told[2]
    assert "Did you mean 'bytegrad'" in told[3]
    assert "replicas: expected one of 'average', 'rank0', 'all', got 'mean'" in told[4]


def callbacks_and_bagua(folder: str) -> None:
    """A switch in mid-fit that a resumed run makes again, a monitor, and Bagua's names."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from asyncddp.integrations.bagua import BaguaStrategy
    from asyncddp.integrations.lightning import (
        AsyncDDPStrategy,
        ConsensusMonitor,
        SwitchAlgorithm,
    )
    from tests.lightning.modules import Regression

    def make(epochs: int) -> Any:
        switch = SwitchAlgorithm({1: ("decentralized", {"peer_selection_mode": "shift_one"})})
        kept = ModelCheckpoint(folder, save_last=True)
        return trainer(
            AsyncDDPStrategy("gradient_allreduce"),
            max_epochs=epochs,
            enable_checkpointing=True,
            logger=CSVLogger(folder, version=0) if bf.rank() == 0 else False,
            callbacks=[kept, switch, ConsensusMonitor(every=2)],
        )

    first = make(2)
    first.fit(Regression(), shares())
    assert first.strategy.optimizers[0].algorithm == "decentralized"
    second = make(3)
    second.fit(Regression(), shares(), ckpt_path=f"{folder}/last.ckpt")
    assert second.strategy.optimizers[0].algorithm == "decentralized"
    for name in ("gradient_allreduce", "bytegrad", "decentralized", "async", "qadam"):
        trained = trainer(BaguaStrategy(algorithm=name), max_epochs=1)
        trained.fit(Regression(name), shares())


@on("mpi-2")
def test_callbacks_switch_and_watch_and_bagua_s_names_train(world: World, tmp_path: Path) -> None:
    """Also after a resume."""
    world.run(callbacks_and_bagua, str(tmp_path))
