"""Data and network of Lightning's tests, the same on all ranks, and a quiet Trainer."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

import asyncddp as bf

warnings.simplefilter("ignore")  # Lightning's hints about workers and loggers
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


def samples() -> torch.utils.data.TensorDataset:
    """The same data on all ranks."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def shares(batch: int = 4) -> torch.utils.data.DataLoader[Any]:
    """Batches of this rank's share, in order."""
    data = samples()
    sampler = torch.utils.data.DistributedSampler(data, bf.size(), bf.rank(), shuffle=False)
    return torch.utils.data.DataLoader(data, batch, sampler=sampler)


def network() -> torch.nn.Module:
    """The same model on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def trainer(strategy: Any, **options: Any) -> Any:
    """A quiet Trainer."""
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    chosen = {"accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False, **quiet}
    return Trainer(strategy=strategy, **{**chosen, **options})
