"""Fabric's strategy on real ranks, beside the optimizer wrapper by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import asyncddp as bf
from tests.lightning.training import network, samples, shares
from tests.support import World, on

pytestmark = pytest.mark.training


def launched(*args: Any, precision: Any = None, **options: Any) -> Any:
    """A Fabric on the world."""
    from lightning.fabric import Fabric

    from asyncddp.integrations.lightning.fabric import AsyncDDPStrategy

    fabric = Fabric(
        accelerator="cpu", strategy=AsyncDDPStrategy(*args, **options), precision=precision
    )
    fabric.launch()
    return fabric


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=1e-6)


def follows_the_wrapper() -> None:
    for algorithm in ("adapt_then_combine", "adapt_with_combine", "gradient_allreduce"):
        fabric = launched(algorithm)
        assert (fabric.world_size, fabric.global_rank) == (bf.size(), bf.rank())
        plain = network()
        model, optimizer = fabric.setup(plain, sgd(plain))
        for number, (x, y) in enumerate(shares()):
            stepping = number % 2 == 1
            with fabric.no_backward_sync(model, enabled=not stepping):
                fabric.backward(F.mse_loss(model(x), y))
            if stepping:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        net = network()
        expected = bf.DistributedOptimizer(sgd(net), net, algorithm)
        for x, y in shares(8):
            (2 * F.mse_loss(net(x), y)).backward()  # the sum of two halves' means
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            expected.step()
            expected.zero_grad()
        same(plain, net)


def trained(fabric: Any, epochs: int, state: dict[str, Any]) -> None:
    for _ in range(epochs):
        for x, y in shares():
            state["optimizer"].zero_grad()
            fabric.backward(F.mse_loss(state["model"](x), y))
            state["optimizer"].step()
            state["batches"] += 1


def fresh(fabric: Any) -> dict[str, Any]:
    net = network()
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(sgd(net))
    return {"model": model, "optimizer": optimizer, "batches": 0, "own": 10 + bf.rank()}


def saves_and_loads(folder: str) -> None:
    for policy in ("average", "rank0", "all"):
        fabric = launched("adapt_with_combine", replicas=policy)
        state = fresh(fabric)
        trained(fabric, 1, state)
        path = f"{folder}/{policy}.ckpt"
        fabric.save(path, state)
        saved = torch.load(path, weights_only=True)
        assert saved["asyncddp"]["world_size"] == bf.size()
        with bf.average_model(state["model"].module):
            mean = [one.detach().clone() for one in state["model"].parameters()]
        first = [bf.broadcast(one.detach(), 0) for one in state["model"].parameters()]
        expected = first if policy == "rank0" else mean
        torch.testing.assert_close(list(saved["model"].values()), expected)

        again = fresh(fabric)
        again["more"] = 1
        with pytest.raises(KeyError, match="has no more; it has model, optimizer, batches, own"):
            fabric.load(path, again)
        del again["more"]
        assert fabric.load(path, again) == {}
        assert again["batches"] == len(shares())
        assert again["own"] == 10 + bf.rank() * (policy == "all")
        begun = state["model"].state_dict() if policy == "all" else saved["model"]
        torch.testing.assert_close(again["model"].state_dict(), begun, rtol=0, atol=0)
        trained(fabric, 1, state)
        trained(fabric, 1, again)
        if policy == "all":
            for one, other in zip(
                state["model"].parameters(), again["model"].parameters(), strict=True
            ):
                assert torch.equal(one, other)


def verbs_and_mistakes() -> list[str]:
    from lightning.fabric import Fabric

    fabric = launched("bytegrad", precision="bf16-mixed")
    rank, ranks = bf.rank(), bf.size()
    assert fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum") == ranks * (ranks - 1) / 2
    assert fabric.all_gather(torch.tensor(rank)).tolist() == list(range(ranks))
    assert fabric.broadcast(rank, 1) == 1
    fabric.barrier()
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(samples(), batch_size=4))
    assert sum(len(x) for x, _ in loader) == 64 // ranks
    named = Fabric(accelerator="cpu", strategy="asyncddp_win_put")
    assert named.strategy.strategy_name == "asyncddp"
    told = []
    with pytest.raises(bf.ArgumentError) as caught:
        fabric.setup_optimizers(sgd(network()))
    told.append(str(caught.value))
    net = network()
    fabric.setup(net, sgd(net))
    with pytest.raises(bf.ArgumentError) as caught:
        fabric.setup_optimizers(sgd(net))
    told.append(str(caught.value))
    with pytest.raises(bf.ArgumentError) as caught:
        Fabric(accelerator="cpu", strategy="asyncddp", devices=8)
    told.append(str(caught.value))
    return told


@on("mpi-2")
def test_fabric_trains_as_the_wrapper(world: World) -> None:
    """With accumulation and clipping."""
    world.run(follows_the_wrapper)


@on("mpi-2")
def test_fabric_saves_and_loads_by_policy(world: World, tmp_path: Path) -> None:
    """Per rank it goes on to the last bit."""
    world.run(saves_and_loads, str(tmp_path))


@on("mpi-2")
def test_fabric_s_verbs_and_mistakes(world: World) -> None:
    """Names are registered, and a contradiction has both numbers."""
    for told in world.run(verbs_and_mistakes):
        assert "call fabric.setup(model, optimizer)" in told[0]
        assert "was given two optimizers of one parameter of shape (8, 4): SGD and SGD" in told[1]
        assert "Fabric: argument devices: got 8 on a machine with 2" in told[2]
