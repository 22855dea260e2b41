"""Header of a ring buffer: 64-bit words by which its sender and its readers know of each other.

It begins with lines of 64 bytes::

    lines 0, 1    for even and odd steps: chunks published, where the tensor lies, for which ranks
    lines 2 …     for each rank of the machine: chunks that it has read (its acknowledgement)

Of more than 256 ranks each acknowledges in a word of line 2 and after it, so that the header stays
small, and the words that say for which ranks a tensor is come last.
"""

from __future__ import annotations

LINE = 8
"""Words of a line."""
DESCRIPTOR, SIZE, OFFSET, MASK = 1, 2, 3, 4
"""Words of a line after its first one, the progress."""
CYCLE = SIZE
"""Of a tensor in the slots: how many of them it goes round in."""
_LINE_FOR_EACH = 256  # ranks that have a line each, so that none of them slows another one down


def header_words(ranks: int) -> int:
    """Return the words of the header for so many ranks."""
    if ranks <= _LINE_FOR_EACH:
        return LINE * (2 + ranks)
    return -(-mask_word(ranks, 2) // LINE) * LINE


def acknowledgement_word(ranks: int, index: int) -> int:
    """Return the word in which one of so many ranks acknowledges."""
    return LINE * 2 + index * (LINE if ranks <= _LINE_FOR_EACH else 1)


def mask_word(ranks: int, half: int) -> int:
    """Return the first word of the mask of ranks for which an even or odd step is."""
    if ranks <= _LINE_FOR_EACH:
        return LINE * half + MASK
    return LINE * 2 + ranks + half * -(-ranks // 64)
