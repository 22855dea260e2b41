"""``lloyd_max_int2`` gives each element the mean of one of four bins of its block."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS
from asyncddp.compression.lloyd_max_int2 import LloydMaxInt2
from asyncddp.compression.tensor_compressor import TensorCompressor
from tests.support import LoopbackWorld


def by_numpy(x):
    """Block by block, and value by value."""
    found = np.zeros_like(x)
    for start in range(0, len(x), 4096):
        block = x[start : start + 4096]
        edges = block.mean() + 0.9816 * block.std() * np.array([-1, 0, 1])
        codes = np.searchsorted(edges, block, side="right")
        for code in range(4):
            if (codes == code).any():
                found[start : start + 4096][codes == code] = block[codes == code].mean()
    return found


@pytest.mark.parametrize("numel", [1, 5, 4096, 4097, 10_000])
def test_means_of_four_bins(numel):
    """By numpy, of whole blocks and of one that is short."""
    x = np.random.default_rng(numel).standard_normal(numel) + 0.1
    codec = TensorCompressor(LloydMaxInt2())
    encoded = codec.encode(torch.from_numpy(x)[None])
    got = codec.decode(encoded, torch.empty(1, numel, dtype=torch.float64))[0]
    np.testing.assert_allclose(got.numpy(), by_numpy(x), rtol=0, atol=1e-12)


def test_two_bits_an_element():
    """And four values a block: a fifteenth of float32 at least."""
    numel = 4096 * 100
    assert LloydMaxInt2().encoded_size(numel, torch.float32) == numel // 4 + 16 * 100
    assert LloydMaxInt2().bits_per_element(numel) < 2.04


def test_what_is_lost_of_normal_elements():
    """11.75 % of the square, as Max has it for four levels; the sum of a block is kept."""
    x = torch.randn(1, 4096 * 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    codec = TensorCompressor(LloydMaxInt2())
    got = codec.decode(codec.encode(x), torch.empty_like(x))
    assert float((got - x).square().mean()) == pytest.approx(0.1175, abs=0.002)
    torch.testing.assert_close(got.view(50, -1).sum(1), x.view(50, -1).sum(1))


def changes(steps):
    """Outer parameters after local steps that add the same change each time."""
    model = torch.nn.Linear(64, 64, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"communication_interval": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    optimizer = bf.DistributedOptimizer(plain, model, "muloco", **options)
    step = torch.randn(64, 64, generator=torch.Generator().manual_seed(bf.rank())).double()
    for _ in range(steps):
        model.weight.grad = step.clone()
        optimizer.step()
    return model.weight.detach().clone(), step, optimizer.bytes_sent


def test_muloco_loses_nothing_in_the_long_run():
    """Error feedback: after 50 rounds models are the sum of all changes but a few, on all ranks."""
    found = LoopbackWorld(4).run(changes, 50)
    mean = torch.stack([step for _, step, _ in found]).mean(0)
    for weight, _, sent in found:
        assert torch.equal(weight, found[0][0])
        assert float((weight / -50 - mean).norm() / mean.norm()) < 0.05
        assert sent < 50 * 64 * 64 * 8 * 1.5 / 16
    assert ALGORITHMS["muloco"].default_compression == "lloyd_max_int2"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is in torch 2.9")
def test_muon_makes_the_local_steps():
    """Two wrappers of one model, for matrices and for the rest; ranks hold one model."""

    def case():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        matrices = [one for one in model.parameters() if one.dim() == 2]
        vectors = [one for one in model.parameters() if one.dim() != 2]
        options = {"algorithm": "muloco", "communication_interval": 4}
        muon = bf.DistributedOptimizer(torch.optim.Muon(matrices, lr=0.02), model, **options)
        adam = bf.DistributedOptimizer(torch.optim.AdamW(vectors, lr=0.02), model, **options)
        data = torch.Generator().manual_seed(bf.rank())
        losses = []
        for _ in range(60):
            x = torch.randn(16, 8, generator=data)
            muon.zero_grad()
            adam.zero_grad()
            loss = (model(x)[:, 0] - x[:, 0]).square().mean()
            loss.backward()
            muon.step()
            adam.step()
            losses.append(loss.item())
        return bf.consensus_distance(model), losses[0], sum(losses[-8:]) / 8

    for distance, first, last in LoopbackWorld(2).run(case):
        assert distance < 1e-6
        assert last < 0.3 * first
