"""LightningModules of the tests; cases import them, so that collecting tests loads no Lightning."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule

import asyncddp as bf
from tests.lightning.training import network


class Regression(LightningModule):
    """A network that a plain optimizer trains, or the one of an algorithm."""

    def __init__(self, algorithm: str = "", *, by_hand: bool = False) -> None:
        super().__init__()
        self.net, self.automatic_optimization = network(), not by_hand
        self.algorithm = algorithm

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """The loss, and where it is done by hand a step."""
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """The loss of all ranks."""
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("error", loss, sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        """SGD with a schedule, or what qadam needs."""
        if self.algorithm == "qadam":
            return bf.QAdamOptimizer(self.parameters(), lr=0.01, warmup_steps=3)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]


class Alternating(Regression):
    """Two networks, each with an optimizer of its own, trained in turns by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.automatic_optimization = network(), False

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer, part in zip(self.optimizers(), (self.net, self.second), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(part(batch[0]), batch[1]))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(one.parameters(), lr=0.05) for one in (self.net, self.second)]


class Scheduled(Regression):
    """AdamW with a schedule by steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Gathering(Regression):
    """A loss that depends on all ranks' outputs."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        every = self.all_gather(self.net(batch[0]), sync_grads=True)
        assert every.shape[0] == bf.size()
        # the mean over ranks of this loss has the gradient of the whole batch's
        return F.mse_loss(every.flatten(0, 1), self.all_gather(batch[1]).flatten(0, 1))


class Looking(Regression):
    """Remembers which rows it saw, and predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen += batch[0][:, 0].tolist()
        return super().training_step(batch, index)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch[0])


class Validated(Regression):
    """Sees whether parameters stand still while it validates."""

    def validation_step(self, batch: Any, index: int) -> None:
        before = [one.detach().clone() for one in self.parameters()]
        time.sleep(0.02)
        assert all(map(torch.equal, before, self.parameters()))


class Straggler(Regression):
    """Rank 0 is late in each batch."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 0:
            self.began = time.monotonic()
        if bf.rank() == 0:
            time.sleep(0.1)

    def on_train_batch_end(self, *args: Any) -> None:
        self.took = time.monotonic() - self.began

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])


class Remembering(Regression):
    """Has a state of its own, which differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.own = 10 + bf.rank()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep it."""
        checkpoint["own"] = self.own

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it."""
        self.own = checkpoint["own"]


class Uneven(Regression):
    """Logs what each rank finds alone, as a figure that decides, or in every batch for all."""

    def __init__(self, *, sync: bool) -> None:
        super().__init__()
        self.sync = sync

    def validation_step(self, batch: Any, index: int) -> None:
        """The loss for all ranks, or what is better on ranks that do not count."""
        if self.sync:
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.log("error", loss, on_step=True, on_epoch=True, sync_dist=True)
        else:
            place = self.current_epoch * (-1) ** bf.rank() + 0.1 * bf.rank()
            self.log("error", torch.tensor(place), sync_dist=False)


class Twice(Regression):
    """Two optimizers of the same parameters."""

    def __init__(self) -> None:
        super().__init__(by_hand=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.05), torch.optim.Adam(self.parameters())]


class Measured(Regression):
    """Logs a metric of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, index: int) -> None:
        """The rank, of all ranks."""
        self.mean.update(torch.full((2,), float(bf.rank())))
        self.log("rank", self.mean, on_epoch=True)
