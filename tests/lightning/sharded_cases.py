"""Lightning on four ranks whose replicas are sharded, beside whole replicas trained by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import asyncddp as bf
from asyncddp.integrations.lightning import (
    AsyncModelParallelStrategy,
    ConsensusMonitor,
    SwitchAlgorithm,
    TimelineCallback,
)
from tests.lightning.training import trainer
from tests.sharded.tool_cases import refusal
from tests.sharded.training import full, make_net
from tests.sharded.world import folder_of_all

CASES: dict[str, Callable[[], Any]] = {}
FSDP, TP = {"data_parallel_size": 2}, {"data_parallel_size": 1, "tensor_parallel_size": 2}
CLIP = 0.05


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def samples() -> torch.utils.data.TensorDataset:
    make = partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.utils.data.TensorDataset(make(64, 6), make(64, 5))


def loader(share: tuple[int, int] | None = None) -> torch.utils.data.DataLoader[Any]:
    """Batches of all samples, which Lightning divides, or of a share of them."""
    data = samples()
    if share is None:
        return torch.utils.data.DataLoader(data, 4)
    sampler = torch.utils.data.DistributedSampler(data, *share)  # as Lightning's, which shuffles
    return torch.utils.data.DataLoader(data, 4, sampler=sampler)


def shard(net: torch.nn.Module, data: DeviceMesh, tensor: DeviceMesh) -> None:
    """Shard a network as Lightning's guide does, over either dimension or both."""
    if tensor.size() > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in (net.first, net.second):
            parallelize_module(block, tensor, plan)
    if data.size() > 1:
        for part in (net.first, net.second, net):
            fully_shard(part, mesh=data)


class Sharded(LightningModule):
    """A network in shards, which a plain optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = make_net(), []

    def configure_model(self) -> None:
        shard(self.net, self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append([full(one).detach().clone() for one in self.net.parameters()])
        self.log("error", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ByHand(Sharded):
    """The same, whose replicas are the data-parallel ranks of Lightning's own strategy."""

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["tensor_parallel"])

    def configure_optimizers(self) -> Any:
        plain, mesh = super().configure_optimizers(), self.device_mesh["data_parallel"]
        return bf.DistributedOptimizer(plain, self.net, "adapt_with_combine", mesh=mesh)


def strategy(*args: Any, **options: Any) -> Any:
    return AsyncModelParallelStrategy(*args, **{**FSDP, **options})


def whole(
    replica: int,
    mesh: DeviceMesh,
    *,
    epochs: int,
    parts: int,
    every: int = 1,
    clip: float = CLIP,
    **arguments: Any,
) -> torch.nn.Module:
    """Train whole replicas by hand, each with the data of all its ranks."""
    net = make_net()
    shares = [loader((2 * parts, replica * parts + part)) for part in range(parts)]
    with bf.replicas(mesh):
        plain = torch.optim.AdamW(net.parameters(), lr=1e-2)
        optimizer = bf.DistributedOptimizer(plain, net, **arguments)
        for epoch in range(epochs):
            for share in shares:
                share.sampler.set_epoch(epoch)
            for number, batches in enumerate(zip(*shares, strict=True), 1):
                x, y = (torch.cat(one) for one in zip(*batches, strict=True))
                ((net(x) - y).square().mean() / every).backward()
                if number % every == 0:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                    optimizer.step()
                    optimizer.zero_grad()
        optimizer.close()
    return net


def difference(net: torch.nn.Module, expected: torch.nn.Module) -> float:
    pairs = zip(net.parameters(), expected.parameters(), strict=True)
    return max(float((full(one) - other).detach().abs().max()) for one, other in pairs)


METHODS: dict[str, dict[str, Any]] = {
    "adapt_with_combine": {},
    "diloco": {"communication_interval": 2},
    "gradient_allreduce": {},
}


@case
def trainer_beside_a_loop() -> list[float]:
    """Accumulated, by FSDP2 and by tensor parallelism, on shares of the data; FSDP2's clipped.

    Torch clips no mixture of DTensors and others, as this plan of tensor parallelism has.
    """
    found = []
    for sizes, parts, clip in ((FSDP, 2, CLIP), (TP, 1, float("inf"))):
        for name, arguments in METHODS.items():
            model = Sharded()
            made = AsyncModelParallelStrategy(name, **sizes, **arguments)
            clipped = CLIP if clip == CLIP else None
            trainer(made, gradient_clip_val=clipped, accumulate_grad_batches=2).fit(model, loader())
            mesh = model.device_mesh
            expected = whole(
                mesh.get_local_rank("replica"),
                mesh["replica"],
                epochs=2,
                parts=parts,
                every=2,
                clip=clip,
                algorithm=name,
                **arguments,
            )
            found.append(difference(model.net, expected))
    return found


@case
def lightnings_own_strategy() -> list[float]:
    """ModelParallelStrategy with a DistributedOptimizer of configure_optimizers."""
    model = ByHand()
    own = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    trainer(own, devices=4, gradient_clip_val=CLIP).fit(model, loader())
    mesh, arguments = model.device_mesh, {"algorithm": "adapt_with_combine"}
    expected = whole(
        mesh.get_local_rank("data_parallel"), mesh["data_parallel"], epochs=2, parts=1, **arguments
    )
    return [difference(model.net, expected)]


@case
def fabrics_own_strategy() -> list[float]:
    """Fabric's ModelParallelStrategy with a DistributedOptimizer of the model that is set up."""

    def parallelize(net: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        return fully_shard(net, mesh=mesh["tensor_parallel"])

    own = FabricModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=2)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=own)
    fabric.launch()
    net = fabric.setup_module(make_net())
    mesh = own.device_mesh["data_parallel"]
    plain = torch.optim.AdamW(net.parameters(), lr=1e-2)
    distributed = bf.DistributedOptimizer(plain, net.module, "adapt_with_combine", mesh=mesh)
    optimizer = fabric.setup_optimizers(distributed)
    replica = mesh.get_local_rank()
    for x, y in fabric.setup_dataloaders(loader((2, replica)), use_distributed_sampler=False):
        fabric.backward((net(x) - y).square().mean())
        fabric.clip_gradients(net, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
    expected = whole(replica, mesh, epochs=1, parts=1, algorithm="adapt_with_combine")
    return [difference(net.module, expected)]


class Kept(Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, float] = {}

    name, version = "kept", 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Keep nothing of these."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.figures.update(metrics)


@case
def callbacks() -> list[list[Any]]:
    """The monitor, a switch and the timeline, with either strategy."""
    found = []
    own = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    for model, made in ((Sharded(), strategy("adapt_with_combine")), (ByHand(), own)):
        kept, switch = Kept(), SwitchAlgorithm({1: "gradient_allreduce"})
        several = [ConsensusMonitor(every=1), switch, TimelineCallback()]
        run = trainer(made, devices=4 if made is own else 1, callbacks=several, logger=kept)
        run.fit(model, loader())
        distances = [kept.figures.get(f"asyncddp/consensus_distance/rank_{n}") for n in range(2)]
        found.append([run.optimizers[0].algorithm, *distances])
    return found


@case
def validation() -> list[Any]:
    """Of the average, which all replicas share, or of each replica's own model."""
    found = []
    for which in ("average", "local"):
        model = Sharded()
        run = trainer(strategy("adapt_with_combine", validate=which), max_epochs=1)
        run.fit(model, loader(), loader())
        with bf.replicas(model.device_mesh["replica"]):
            apart = bf.consensus_distance(model.seen[-1])
            own = bf.consensus_distance([full(one).detach() for one in model.net.parameters()])
        found.append([apart < 1e-12, own > 1e-6])
    return found


# checkpoints


def trained(*, epochs: int, resume: Any = None, **options: Any) -> tuple[Sharded, Any]:
    model = Sharded()
    run = trainer(strategy("gradient_tracking", **options), max_epochs=epochs)
    run.fit(model, loader(), ckpt_path=resume)
    return model, run


@case
def resumed() -> list[Any]:
    """Replicas go on exactly from their own parts, or all from the average, on other shapes."""
    folder = folder_of_all()
    model, run = trained(epochs=1, replicas="all")
    run.save_checkpoint(folder / "all.ckpt")
    with bf.average_model(model, mesh=model.device_mesh["replica"]):
        average = [full(one).detach().clone() for one in model.net.parameters()]
    straight, _ = trained(epochs=2, replicas="all")
    again, later = trained(epochs=2, resume=folder / "all.ckpt", replicas="all")
    pairs = zip(straight.net.parameters(), again.net.parameters(), strict=True)
    exact = all(torch.equal(full(one), full(other)) for one, other in pairs)
    one, _ = trained(epochs=1, resume=folder / "all.ckpt", data_parallel_size=4)
    pairs = zip(average, one.net.parameters(), strict=True)
    near = max(float((a - full(b).detach()).abs().max()) for a, b in pairs)
    return [exact, later.global_step, later.current_epoch, near]


@case
def weights_and_tests() -> list[Any]:
    """A checkpoint of weights alone is tested; an exception's is not written."""
    folder = folder_of_all()
    model, run = trained(epochs=1)
    run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    other = Sharded()
    other.test_step = other.validation_step
    with torch.no_grad():
        other.net.head.weight.zero_()
    trainer(strategy(), max_epochs=1).test(other, loader(), ckpt_path=folder / "weights.ckpt")
    with bf.average_model(model, mesh=model.device_mesh["replica"]):
        near = difference(other.net, _whole_copy(model.net))
    run.strategy.on_exception(RuntimeError())
    run.strategy.save_checkpoint({}, folder / "late.ckpt")
    return [near, (folder / "late.ckpt").exists()]


def _whole_copy(net: torch.nn.Module) -> torch.nn.Module:
    found = make_net()
    found.load_state_dict({name: full(one) for name, one in net.state_dict().items()})
    return found


@case
def mistakes() -> dict[str, str]:
    folder = folder_of_all()
    run = trainer(strategy())
    return {
        "ranks": refusal(lambda: strategy(data_parallel_size=3)),
        "size": refusal(lambda: strategy(tensor_parallel_size=0)),
        "validate": refusal(lambda: strategy(validate="replica")),
        "devices": refusal(lambda: trainer(strategy(), devices=3)),
        "checkpoint": refusal(lambda: run.fit(Sharded(), loader(), ckpt_path=folder)),
    }
