"""What users of a Trainer expect, on real ranks: each beside the same loop by hand."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import asyncddp as bf
from tests.lightning.training import network, samples, shares, trainer
from tests.support import World, on

pytestmark = pytest.mark.training


def strategy(*args: Any, **options: Any) -> Any:
    from asyncddp.integrations.lightning import AsyncDDPStrategy

    return AsyncDDPStrategy(*args, **options)


def same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=1e-6)


# optimisation


def several_optimizers() -> None:
    from tests.lightning.modules import Alternating

    for algorithm in ("adapt_then_combine", "adapt_with_combine", "gradient_allreduce"):
        model = Alternating()
        trainer(strategy(algorithm), use_distributed_sampler=False).fit(model, shares())
        nets = [network(), network()]
        pairs = [
            (
                bf.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net, algorithm),
                net,
            )
            for net in nets
        ]
        for _ in range(2):
            for x, y in shares():
                for optimizer, net in pairs:
                    optimizer.zero_grad()
                    F.mse_loss(net(x), y).backward()
                    optimizer.step()
        same(model.net, nets[0])
        same(model.second, nets[1])


def value_clipping_and_schedule() -> None:
    from tests.lightning.modules import Scheduled

    model = Scheduled()
    options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    trainer(strategy("bytegrad"), use_distributed_sampler=False, **options).fit(model, shares())
    net = network()
    plain = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizer = bf.DistributedOptimizer(plain, net, "bytegrad")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(2):
        for x, y in shares():
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            torch.nn.utils.clip_grad_value_(net.parameters(), 0.05)
            optimizer.step()
            schedule.step()
    same(model.net, net)


def mixed_precision() -> None:
    from tests.lightning.modules import Regression

    model = Regression()
    trained = trainer(strategy(), precision="bf16-mixed", use_distributed_sampler=False)
    trained.fit(model, shares())
    net = network()
    plain = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer = bf.DistributedOptimizer(plain, net)
    for _ in range(2):
        for x, y in shares():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
    same(model.net, net)


@on("mpi-2")
def test_several_optimizers_train_as_wrapped_by_hand(world: World) -> None:
    """Each network has its own rounds."""
    world.run(several_optimizers)


@on("mpi-2")
def test_clipping_by_value_and_schedules_by_step(world: World) -> None:
    """Averaged gradients are clipped."""
    world.run(value_clipping_and_schedule)


@on("mpi-2")
def test_bf16_mixed_averages_float32_parameters(world: World) -> None:
    """As autocast by hand."""
    world.run(mixed_precision)


# collectives


def gathers_with_gradients() -> None:
    from tests.lightning.modules import Gathering

    model = Gathering()
    trainer(strategy("gradient_allreduce"), max_epochs=1, use_distributed_sampler=False).fit(
        model, shares()
    )
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    batches = [bf.allgather(torch.cat([x, y], 1)) for x, y in shares()]
    for batch in batches:
        optimizer.zero_grad()
        F.mse_loss(net(batch[:, :4]), batch[:, 4:]).backward()
        optimizer.step()
    same(model.net, net)


def reductions() -> None:
    used = trainer(strategy()).strategy
    rank, ranks = bf.rank(), bf.size()
    tensor = torch.tensor([float(rank)])
    assert used.reduce(tensor.clone()).item() == (ranks - 1) / 2
    assert used.reduce(tensor.clone(), reduce_op=None).item() == (ranks - 1) / 2
    for name in ("sum", torch.distributed.ReduceOp.SUM):
        assert used.reduce(tensor.clone(), reduce_op=name).item() == ranks * (ranks - 1) / 2
    assert used.reduce(torch.tensor(rank), reduce_op="max").item() == ranks - 1
    assert used.reduce("words") == "words"
    changed = tensor.clone()
    assert used.reduce(changed) is changed
    for arguments in ({"group": object()}, {"reduce_op": "median"}):
        with pytest.raises(bf.ArgumentError, match="reduce: argument"):
            used.reduce(tensor, **arguments)
    assert used.broadcast({"rank": rank}, 1) == {"rank": 1}
    assert used.reduce_boolean_decision(rank == 0, all=False)
    assert not used.reduce_boolean_decision(rank == 0, all=True)


@on("mpi-2")
def test_all_gather_has_gradients(world: World) -> None:
    """A loss of all ranks' outputs trains as the whole batch in one process."""
    world.run(gathers_with_gradients)


@on("mpi-2")
def test_reduce_takes_what_lightning_gives(world: World) -> None:
    """Names, torch's enumeration, None, and what is no tensor."""
    world.run(reductions)


# runs


def fits_twice() -> None:
    from lightning.pytorch.callbacks import Callback

    from tests.lightning.modules import Regression

    for algorithm in ("adapt_with_combine", "win_put", "gradient_allreduce"):
        model, windows = Regression(), []
        for epochs in (1, 2, 3):
            trained = trainer(strategy(algorithm), max_epochs=1)
            trained.fit(model, shares())
            assert trained.global_step == len(shares()), epochs
            windows.append(len(bf.get_current_created_window_names()))
            with pytest.raises(bf.UsageError, match="after close"):
                trained.strategy.distributed_optimizers[0].step()
        assert len(set(windows)) == 1, (algorithm, windows)
        hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
        assert hooks == 0, algorithm
    again = trainer(strategy("adapt_with_combine"), max_epochs=1)
    again.fit(model, shares())
    assert bf.consensus_distance(model) > 0
    own = [parameter.detach().clone() for parameter in model.parameters()]
    again.validate(model, shares(), verbose=False)
    assert all(map(torch.equal, own, model.parameters()))
    again.fit_loop.max_epochs = 3

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert all(map(torch.equal, own, pl_module.parameters()))

    again.callbacks.append(Look())
    again.fit(model, shares())
    assert again.global_step == 3 * len(shares())


def data_module_profiler_and_prediction(folder: str) -> tuple[bool, bool]:
    from lightning import LightningDataModule
    from lightning.pytorch.profilers import SimpleProfiler

    from tests.lightning.modules import Looking

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(samples(), batch_size=8, shuffle=True)

        def predict_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(samples(), batch_size=8)

    model = Looking()
    trained = trainer(
        strategy(validate="average"),
        max_epochs=1,
        enable_progress_bar=True,
        profiler=SimpleProfiler(folder, "times"),
    )
    trained.fit(model, Data())
    whole = bf.allgather(torch.tensor(model.seen)).sort().values
    torch.testing.assert_close(whole, samples().tensors[0][:, 0].sort().values)
    predicted = torch.cat(trained.predict(model, Data()))
    with bf.average_model(model), torch.no_grad():
        expected = model.net(samples().tensors[0][bf.rank() :: bf.size()])
    torch.testing.assert_close(predicted, expected)
    bar = trained.progress_bar_callback
    return bar.is_enabled, Path(folder, f"fit-times-{bf.rank()}.txt").exists()


@on("mpi-2")
def test_fit_again_leaves_no_windows_and_no_hooks(world: World) -> None:
    """By a new Trainer and by the same, which goes on from each rank's own model."""
    world.run(fits_twice)


@on("mpi-2")
def test_a_data_module_is_shared_out_and_predicted(world: World, tmp_path: Path) -> None:
    """All rows once; prediction sees the average; the bar is rank 0's, the profiler everyone's."""
    found = world.run(data_module_profiler_and_prediction, str(tmp_path))
    assert found == [(True, True), (False, True)]


# asynchronous methods


def pauses_and_stops() -> None:
    from tests.lightning.modules import Validated

    threads = set(threading.enumerate())
    used = strategy("async_model_average", sync_interval_ms=1, validate="local")
    trained = trainer(used, val_check_interval=2)
    trained.fit(Validated(), shares(), shares())
    assert trained.global_step == 2 * len(shares())
    assert set(threading.enumerate()) <= threads


def keeps_its_speed(algorithm: str) -> float:
    from tests.lightning.modules import Straggler

    model = Straggler()
    trainer(strategy(algorithm), max_epochs=1).fit(model, shares(2))
    return model.took


@on("mpi-2")
def test_averaging_by_the_clock_pauses_for_validation(world: World) -> None:
    """Parameters stand still, and no thread outlives the fit."""
    world.run(pauses_and_stops)


@on("mpi-2")
@pytest.mark.parametrize("algorithm", ["win_put", "push_sum"])
def test_a_late_rank_keeps_none_waiting(world: World, algorithm: str) -> None:
    """The other makes its batches in a fraction of the time; scripts/bench has the figure."""
    late, early = world.run(keeps_its_speed, algorithm)
    assert late >= 1.6
    assert early < late / 2


# process groups


def with_a_group() -> list[str]:
    from tests.lightning.modules import Measured

    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trained = trainer(strategy(process_group_backend="gloo"), max_epochs=1)
            trained.fit(Measured(), shares(), shares())
        assert torch.distributed.get_backend() == "gloo"
        assert trained.callback_metrics["rank"].item() == (bf.size() - 1) / 2
        return [str(one.message) for one in told if "process_group_backend" in str(one.message)]
    finally:
        torch.distributed.destroy_process_group()


@on("mpi-2")
def test_a_process_group_serves_torchmetrics(world: World) -> None:
    """Rank 0 warns that all then go at one pace."""
    told = world.run(with_a_group)
    assert [len(one) for one in told] == [1, 0]
