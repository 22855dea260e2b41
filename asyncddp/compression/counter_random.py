"""Counter-based random numbers: each is a function of a seed and its index alone.

The same seeds give the same numbers on every device, in any order, without a torch generator.
"""

from __future__ import annotations

import torch

from asyncddp.tensors.allocation import arange

_WORD = (1 << 64) - 1
_INCREMENT = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def random_words(seeds: int | torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    """Compute 64 random bits for each index from 0 on, by SplitMix64.

    Args:
        seeds: A seed, or int64 seeds of shape ``(K, 1)`` on the device that are random words.
        count: How many for each seed.
        device: Where to compute them.

    Returns:
        int64 of shape ``(count,)`` or ``(K, count)``.

    Example:
        >>> words = random_words(7, 3, torch.device("cpu"))
        >>> torch.equal(words[:2], random_words(7, 2, torch.device("cpu")))
        True

    References:
        Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
        Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    if isinstance(seeds, int):  # consecutive seeds would give the same words, shifted
        seeds = _signed(_mixed(seeds & _WORD))
    words = arange(count, torch.int64, device).mul_(_signed(_INCREMENT)) + seeds
    for shift, factor in _MIX:
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    return words.bitwise_xor_(_shifted(words, _LAST_SHIFT))


def below(words: torch.Tensor, bounds: int | torch.Tensor) -> torch.Tensor:
    """Turn random words into random integers from 0 to ``bounds`` - 1, with bounds up to 2³¹."""
    return _shifted(words, 33).mul_(bounds).bitwise_right_shift_(31)


def normal(words: torch.Tensor) -> torch.Tensor:
    """Turn random words into float64 numbers of the standard normal distribution."""
    shares = words.bitwise_right_shift(12).to(torch.float64).add_(0.5).mul_(2.0**-52).add_(0.5)
    numbers: torch.Tensor = torch.special.ndtri(shares)
    return numbers


def _mixed(word: int) -> int:
    for shift, factor in _MIX:
        word = ((word ^ (word >> shift)) * factor) & _WORD
    return word ^ (word >> _LAST_SHIFT)


def _signed(word: int) -> int:
    """Reinterpret an unsigned 64-bit word as a signed one."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift words right logically, filling with zeros."""
    return words.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1)
