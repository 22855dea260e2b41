"""CHOCO keeps the mean over ranks for every compressor, and brings the ranks together."""

from __future__ import annotations

import itertools

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.compression import COMPRESSORS
from tests.support import LoopbackWorld
from tests.support.loops import on_each_rank

N, SIZE = 4, 400


def gossip(compression, steps, lr=0.0, **options):
    """Steps of a quadratic of this rank's own; gives the models' means and distances by step."""
    model = torch.nn.Linear(SIZE, 1, bias=False, dtype=torch.float64)
    generator = torch.Generator().manual_seed(bf.rank())
    with torch.no_grad():
        model.weight.copy_(torch.randn(1, SIZE, generator=generator, dtype=torch.float64))
    own = torch.randn(1, SIZE, generator=generator, dtype=torch.float64)
    plain = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = bf.DistributedOptimizer(
        plain,
        model,
        "choco_sgd",
        topology=topology.ring(N),
        compression=compression,
        **options,
        broadcast=False,
    )
    means, distances = [], []
    for _ in range(steps):
        means.append(bf.allreduce(model.weight.detach())[0])
        distances.append(float((model.weight.detach() - means[-1]).norm()))
        optimizer.zero_grad()
        ((model.weight - own).square().sum() / 2).backward()
        optimizer.step()
    return torch.stack(means), distances


@pytest.mark.parametrize("name", list(COMPRESSORS))
def test_the_mean_is_kept_exactly(name):
    """For any compressor the mean over ranks drifts by less than 1e-12."""
    for means, _ in LoopbackWorld(N).run(gossip, name, 20):
        assert float((means - means[0]).abs().max()) < 1e-12


@pytest.mark.parametrize("name", ["sign", "top_k", "qsgd_int8", "power_sgd"])
def test_the_ranks_come_together(name):
    """Consensus is reached with the default step; the more bits, the sooner."""
    compression = COMPRESSORS[name](ratio=0.1) if name in ("top_k", "random_k") else name
    for _, distances in LoopbackWorld(N).run(gossip, compression, 70):
        assert distances[-1] < 0.3 * distances[0]


def test_the_mean_moves_by_the_gradients_alone():
    """With steps the mean goes the way of gradient descent on the mean of the functions."""
    means, _ = LoopbackWorld(N).run(gossip, "sign", 30, lr=0.1)[0]
    limit = means[1] - 0.9 * means[0]  # a tenth of the optimum
    for before, after in itertools.pairwise(means):
        torch.testing.assert_close(after, 0.9 * before + limit, rtol=0, atol=1e-12)


@pytest.mark.parametrize("step", [0, 1.5, -1])
@on_each_rank(ranks=2)
def test_a_consensus_step_out_of_bounds_is_refused(step):
    """By argument, range and value."""
    with pytest.raises(bf.ArgumentError, match=f"argument consensus_step: expected.*{step}"):
        gossip("sign", 1, consensus_step=step)


@on_each_rank(ranks=N)
def test_a_directed_graph_is_refused():
    """The message names the method, the graph, why, and one that works."""
    model = torch.nn.Linear(1, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    words = r"choco_sgd cannot run on exponential_two\(4\): .* Use topology.ring\(4\) instead"
    with pytest.raises(topology.TopologyError, match=words):
        bf.DistributedOptimizer(plain, model, "choco_sgd", topology=topology.exponential_two(4))
