"""Compressors of gradients that cost accuracy with an optimizer are told of, and do cost it."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

import asyncddp as bf
from asyncddp import hooks, simulate, topology
from asyncddp.compression import COMPRESSORS
from tests.support import LoopbackWorld

pytest.importorskip("sklearn.datasets")  # here, since it leaves environment variables behind

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
}
COSTLY = {
    "dct_top_k": ("Adam",),
    "power_sgd": ("Adam",),
    "random_k": ("SGD", "momentum", "Adam"),
    "sign": ("momentum", "Adam"),
    "top_k": ("momentum", "Adam"),
    "top_k_int2": ("Adam",),
}
"""As the table of docs/guides/methods.md shows."""


def wraps(compression, optimizer, algorithm="gradient_allreduce"):
    model = torch.nn.Linear(64, 80)
    plain = OPTIMIZERS[optimizer](model.parameters())
    bf.DistributedOptimizer(plain, model, algorithm, compression=compression)


def told(caplog, *given):
    caplog.clear()
    LoopbackWorld(2).run(wraps, *given)
    return [text for text in caplog.messages if "cost accuracy" in text]


@pytest.mark.parametrize("compression", list(COMPRESSORS))
def test_an_optimizer_with_which_it_costs_is_told_of_once(caplog, compression):
    """By rank 0, with what works in its place; nothing where it costs nothing."""
    for optimizer in OPTIMIZERS:
        messages = told(caplog, compression, optimizer)
        assert len(messages) == (optimizer in COSTLY.get(compression, ())), (optimizer, messages)
        for text in messages:
            assert text.startswith("DistributedOptimizer0: gradient_allreduce: averages of grad")
            assert "'bytegrad'" in text
            assert "'qsgd_int8'" in text


def test_where_it_is_no_average_of_gradients(caplog):
    """Outer gradients, and differences of models, are told of by nobody."""
    assert not told(caplog, "sign", "Adam", "diloco")
    assert not told(caplog, "sign", "momentum", "choco_sgd")


def accuracy(optimizer, compression):
    run = simulate.train(
        simulate.digits(4),
        OPTIMIZERS[optimizer],
        "gradient_allreduce",
        steps=100,
        record_every=100,
        compression=compression,
    )
    return run.score[-1]


@pytest.mark.nightly
@pytest.mark.training
@pytest.mark.parametrize(("compression", "optimizer"), [("sign", "momentum"), ("top_k", "Adam")])
def test_what_is_told_is_so(compression, optimizer):
    """At the same step size accuracy is much lower than without, where ``qsgd_int8`` has it."""
    plain = accuracy(optimizer, None)
    assert accuracy(optimizer, compression) < plain - 0.05
    assert accuracy(optimizer, "qsgd_int8") > plain - 0.02


def test_a_hook_tells_it_whatever_the_optimizer(caplog):
    """It does not see the optimizer; compressors that work are used in silence."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 80))
        with caplog.at_level(logging.WARNING, "asyncddp"):
            hooks.CompressedAllreduceState(ddp, "qsgd_int8")
            hooks.ByteGradState(ddp)
            assert not caplog.messages
            hooks.CompressedAllreduceState(ddp, "sign")
            hooks.NeighborAllreduceState(ddp, topology.complete(1), compression="sign")
        message, other = [text for text in caplog.messages if "cost accuracy" in text]
    finally:
        dist.destroy_process_group()
    assert message.startswith("CompressedAllreduceState: averages of gradients in Sign()")
    assert other.startswith("NeighborAllreduceState: averages of gradients in Sign()")
    assert "cost accuracy with momentum and Adam and its kin" in message
