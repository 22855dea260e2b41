"""Header of a ring buffer: 64-bit words for progress, tensor handle, readers, acknowledgements.

It begins with lines of 64 bytes::

    lines 0, 1    for even and odd steps: published chunks, handle of the tensor, mask of readers
    lines 2 …     for each rank of the machine: chunks that it has read (its acknowledgement)

With more than 256 ranks, each rank acknowledges in a single word from line 2 on, so that the header
stays small, and the masks of readers come last.
"""

from __future__ import annotations

LINE = 8
"""Words of a line."""
DESCRIPTOR, SIZE, OFFSET, MASK = 1, 2, 3, 4
"""Index of a word in a line; word 0 is the progress."""
CYCLE = SIZE
"""Index of the word with the number of slots in use, for a tensor in the slots."""
_LINE_FOR_EACH = 256  # ranks that have a line each, so that none of them slows another one down


def header_words(ranks: int) -> int:
    """Return the number of words of the header, for a number of ranks."""
    if ranks <= _LINE_FOR_EACH:
        return LINE * (2 + ranks)
    return -(-mask_word(ranks, 2) // LINE) * LINE


def acknowledgement_word(ranks: int, index: int) -> int:
    """Return the index of a rank's acknowledgement word, for a number of ranks."""
    return LINE * 2 + index * (LINE if ranks <= _LINE_FOR_EACH else 1)


def mask_word(ranks: int, half: int) -> int:
    """Return the index of the first word of the mask of readers, for even or odd steps."""
    if ranks <= _LINE_FOR_EACH:
        return LINE * half + MASK
    return LINE * 2 + ranks + half * -(-ranks // 64)
