"""top_k and random_k: which elements are kept, how many, and what is sent of them."""

from __future__ import annotations

import math

import pytest
import torch

import asyncddp as bf
from asyncddp.compression.random_k import RandomK
from asyncddp.compression.top_k import TopK
from tests.unit.compression.codec import encoded, normal, received

both = pytest.mark.parametrize("kind", [TopK, RandomK], ids=["top_k", "random_k"])
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@both
def test_a_ratio_keeps_at_least_one(kind):
    """k is the ratio of S, rounded; without options one in a hundred."""
    assert [kind().kept(numel) for numel in (1, 50, 149, 151, 10_000)] == [1, 1, 1, 2, 100]
    assert [kind(ratio=0.5).kept(numel) for numel in (1, 2, 3, 10)] == [1, 1, 2, 5]
    assert kind(ratio=1).kept(7) == 7
    assert kind(k=3).kept(3) == 3


@both
def test_wrong_options_are_named(kind):
    """A ratio outside (0, 1], a k that is no positive integer, and both of them."""
    for wrong in (0, -0.1, 1.5, math.nan, "0.1", True):
        with pytest.raises(
            bf.ArgumentError, match=f"^{kind.name}: argument ratio: expected a numb"
        ):
            kind(ratio=wrong)
    for wrong in (0, -1, 1.0, True, "3"):
        with pytest.raises(
            bf.ArgumentError, match=f"^{kind.name}: argument k: expected a positive"
        ):
            kind(k=wrong)
    with pytest.raises(bf.ArgumentError, match="expected one of the arguments ratio and k, got"):
        kind(ratio=0.1, k=3)


@both
def test_a_k_larger_than_the_chunk_is_named(kind):
    """The message has k, the size of the chunk, and what to do."""
    message = f"^{kind.name}: argument k: expected at most the 4 elements of a chunk, got 5; give a"
    with pytest.raises(bf.ArgumentError, match=message):
        kind(k=5).encoded_size(4, torch.float32)
    with pytest.raises(bf.ArgumentError, match="indices have 32 bits"):
        kind().encoded_size(1 << 31, torch.float32)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_kept_is_exact_and_k_of_it(kind, dtype):
    """Exactly k elements differ from zero, and they are those of the input."""
    x = normal(3, 1000).to(dtype)
    back = received(kind(k=37), x)
    assert back.count_nonzero(1).tolist() == [37] * 3
    assert torch.equal(back[back != 0], x[back != 0])
    assert torch.equal(received(kind(k=1000), x), x)


def test_top_k_sends_indices_and_values():
    """int32 indices, padded to 8 bytes, then values in the tensor's dtype."""
    x = torch.tensor([[0.0, -5, 1, 4, -2]], dtype=torch.float64)
    rows = encoded(TopK(k=3), x)
    assert rows.shape == (1, 16 + 24)
    indices = rows[0, :12].view(torch.int32).tolist()
    assert sorted(indices) == [1, 3, 4]
    assert rows[0, 16:].view(torch.float64).tolist() == [x[0, i] for i in indices]
    sizes = [TopK(k=3).encoded_size(9, dtype) for dtype in DTYPES]
    assert sizes == [16 + 8, 16 + 8, 16 + 16, 16 + 24]


LONG = 300_000


@pytest.mark.parametrize(
    "x",
    [
        normal(LONG),
        normal(LONG).round(),
        torch.zeros(LONG),
        torch.ones(LONG),
        torch.cat([torch.zeros(LONG - 100), normal(100)]),
        torch.arange(LONG) % 4.0,  # its period is that of the sample
        torch.logspace(0, -30, LONG),
        torch.where(torch.arange(LONG) % 4 == 0, 1.0, 0.0),
    ],
    ids=["normal", "ties", "zeros", "equal", "few", "periodic", "falling", "sample of ones"],
)
@pytest.mark.parametrize("k", [1, 100, 3000, 200_000, LONG])
def test_the_largest_of_a_long_chunk_are_found(x, k):
    """Those above a sampled bound are the same as those that torch finds among all."""
    kept = received(TopK(k=k), x).abs().sort(descending=True).values[:k]
    assert torch.equal(kept, x.abs().topk(k).values)


def test_nan_and_infinity_are_the_largest():
    """In short and in long chunks."""
    for numel in (100, LONG):
        x = normal(1, numel) * 1e30
        x[0, 50], x[0, 7] = torch.nan, -torch.inf
        back = received(TopK(k=2), x)
        assert back[0, 50].isnan()
        assert back[0, 7] == -torch.inf


def test_random_k_sends_a_seed_and_values():
    """8 bytes for the seed, then k values; another seed in them selects other elements."""
    q, x = RandomK(k=3), torch.arange(1.0, 101).view(1, -1)
    rows = encoded(q, x, seed=4)
    assert rows.shape == (1, 8 + 16)
    back = torch.empty_like(x)
    q.decode(rows, back)
    assert torch.equal(back[back != 0], x[back != 0])
    rows[0, 0] ^= 1
    q.decode(rows, back)
    assert back.count_nonzero() == 3
    assert not torch.equal(back[back != 0], x[back != 0])


@pytest.mark.parametrize(("k", "numel"), [(1, 10), (3, 10), (7, 10), (10, 10), (13, 50)])
def test_random_k_keeps_each_element_equally_often(k, numel):
    """With probability k / S, whatever the remainder of S by k; no element twice."""
    draws = 20_000
    kept = received(RandomK(k=k), torch.ones(draws, numel), seed=1)
    assert (kept.sum(1) == k).all()
    share = k / numel
    deviation = math.sqrt(share * (1 - share) / draws)
    assert (kept.mean(0) - share).abs().max() <= 4.5 * deviation + 1e-7


def test_random_k_draws_elsewhere_for_each_seed_and_chunk():
    """Two draws of 1 % share about 1 % of their elements."""
    x = torch.ones(2, 100_000)
    draws = torch.cat([received(RandomK(), x, seed=seed) for seed in (0, 1)])
    for one in range(4):
        for other in range(one):
            assert (draws[one] * draws[other]).sum() < 40


def test_random_k_has_two_forms():
    """Scaled by S / k it is unbiased and needs no error feedback; else it is a contraction."""
    x = normal(1, 400, dtype=torch.float64)
    plain, scaled = RandomK(k=100), RandomK(k=100, unbiased=True)
    assert (plain.unbiased, plain.wants_error_feedback) == (False, True)
    assert (scaled.unbiased, scaled.wants_error_feedback) == (True, False)
    torch.testing.assert_close(received(scaled, x, seed=2), 4 * received(plain, x, seed=2))
    assert plain.contraction(400) == 0.25
    assert scaled.contraction(400) is None
    assert scaled.contraction(110) == pytest.approx(0.9)
    assert repr(scaled) == "RandomK(ratio=None, k=100, unbiased=True)"


def test_random_k_tells_of_what_is_not_finite_though_it_was_not_kept():
    """All kept values are then NaN."""
    x = torch.ones(1, 1000)
    kept = received(RandomK(k=5), x, seed=3) != 0
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[0, int(kept.logical_not().nonzero()[0, 1])] = bad
        assert received(RandomK(k=5), x, seed=3)[kept].isnan().all()
