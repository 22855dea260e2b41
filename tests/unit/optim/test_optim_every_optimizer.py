"""Every optimizer of ``torch.optim``, with every method, against W and the plain optimizer."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld
from tests.unit.optim.optim_reference import METHODS, filled, mlp, train_by_matrix, train_here

pytestmark = pytest.mark.training

STEPS = 4
RANKS = 4

OPTIONS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "LBFGS": {"lr": 0.5, "max_iter": 4, "history_size": 3},
    "Muon": {"lr": 0.02, "weight_decay": 0.1},
    "Rprop": {"lr": 0.01},
}
"""Options worth testing; all others get ``lr=0.01``."""

SPARSE_ONLY = {"SparseAdam"}
"""Needs sparse gradients: tested below, on an embedding."""

OPTIMIZERS = {
    name: kind
    for name, kind in ((name, getattr(torch.optim, name)) for name in torch.optim.__all__)
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    if kind is not torch.optim.Optimizer
}


def test_the_list_of_optimizers_is_torchs():
    """A new optimizer of torch is picked up without a change here."""
    assert {"SGD", "Adam", "AdamW", "LBFGS", "Adafactor", "RMSprop"} <= set(OPTIMIZERS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - SPARSE_ONLY))
def test_steps_are_those_of_w_and_the_plain_optimizer(name, method):
    """X+ = W X − U, W (X − U) or x − U(mean g), bit by bit, since halves sum without rounding."""
    make = partial(OPTIMIZERS[name], **OPTIONS.get(name, {"lr": 0.01}))
    model_of = partial(mlp, bias=name != "Muon")  # Muon takes matrices only
    graph = topology.one_peer_exponential(RANKS)
    closure = name == "LBFGS"
    expected = train_by_matrix(method, graph, make, STEPS, model_of=model_of, closure=closure)
    got = LoopbackWorld(RANKS).run(
        train_here, method, graph, make, STEPS, model_of=model_of, closure=closure
    )
    for rank in range(RANKS):
        torch.testing.assert_close(got[rank], expected[rank], rtol=1e-12, atol=1e-13)
    start = train_by_matrix(method, graph, make, 0, model_of=model_of)
    assert not torch.equal(got[0], start[0])


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - SPARSE_ONLY - {"LBFGS"}))
def test_update_in_backward_is_the_same_update(name):
    """Stepping bucket by bucket, five of them here, changes nothing."""
    make = partial(OPTIMIZERS[name], **OPTIONS.get(name, {"lr": 0.01}))
    model_of = partial(mlp, bias=name != "Muon")
    graph = topology.one_peer_exponential(2)
    options = {"model_of": model_of, "bucket_size_in_mb": 1e-5}
    run = partial(LoopbackWorld(2).run, train_here, "adapt_then_combine", graph, make, STEPS)
    for one, other in zip(run(**options), run(**options, update_in_backward=True), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def _embedding(rank):
    return filled(torch.nn.Embedding(6, 2, sparse=True, dtype=torch.float64), rank)


def _embedding_loss(model, x):
    return model(x[:, 0].abs().long() % 6).square().sum()


@pytest.mark.parametrize("method", METHODS[:2])
def test_sparse_gradients_stay_sparse(method):
    """Parameters travel dense; SparseAdam gets the sparse gradient that it wants."""
    graph = topology.one_peer_exponential(2)
    options = {"model_of": _embedding, "loss_of": _embedding_loss}
    make = partial(torch.optim.SparseAdam, lr=0.1)
    expected = train_by_matrix(method, graph, make, STEPS, **options)
    got = LoopbackWorld(2).run(train_here, method, graph, make, STEPS, **options)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_sparse_gradients_cannot_be_averaged():
    """The error names the parameter and what to do."""

    def case():
        make = partial(torch.optim.SparseAdam, lr=0.1)
        with pytest.raises(bf.ArgumentError, match=r"gradient of weight is .*sparse.*sparse=False"):
            train_here(
                "gradient_allreduce",
                topology.ring(2),
                make,
                1,
                model_of=_embedding,
                loss_of=_embedding_loss,
            )

    LoopbackWorld(2).run(case)
