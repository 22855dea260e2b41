"""Counter-based random numbers: SplitMix64's, spread over their range."""

from __future__ import annotations

import torch

from asyncddp.compression.counter_random import below, normal, random_words

HOST = torch.device("cpu")


def test_words_are_those_of_splitmix64():
    """The published numbers of seed 1234567, from index 1 on."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    words = random_words(torch.tensor([[1234567]]), 6, HOST)[0, 1:]
    assert [word % 2**64 for word in words.tolist()] == published


def test_seeds_near_each_other_share_no_words():
    """Also those that differ by SplitMix64's increment, whose streams are shifted."""
    seeds = [0, 1, 2, 0x9E3779B97F4A7C15, 2 * 0x9E3779B97F4A7C15, 2**63 - 1, 2**64 - 1]
    words = torch.cat([random_words(seed, 1000, HOST) for seed in seeds])
    assert len(words.unique()) == len(words)


def test_integers_below_a_bound_are_all_there_equally_often():
    """For bounds that are no power of two, and those near 2³¹ stay below."""
    counts = below(random_words(1, 60_000, HOST), 6).bincount(minlength=6)
    assert (counts - 10_000).abs().max() < 400
    large = below(random_words(2, 1000, HOST), 2**31)
    assert 0 <= large.min() < 2**24 < 2**30 < large.max() < 2**31


def test_normal_numbers_have_the_right_moments():
    """Mean 0, variance 1, kurtosis 3; finite also for the words at the ends."""
    drawn = normal(random_words(3, 100_000, HOST))
    assert abs(drawn.mean()) < 0.015
    assert abs(drawn.var() - 1) < 0.02
    assert abs(drawn.pow(4).mean() - 3) < 0.15
    assert normal(torch.tensor([-(2**63), 0, -1, 2**63 - 1])).isfinite().all()
