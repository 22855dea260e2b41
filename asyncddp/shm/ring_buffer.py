"""Ring buffers in shared memory: one rank writes tensors, peers on the same machine read them.

One ring buffer carries the tensors of one name and signature from one rank to all its readers.
After its header come slots for chunks of the tensor. A small tensor has slots for even and for odd
steps (double buffering); a larger one has a single set, so that less memory is touched. The
progress of the sender and of each reader is one word each: a step and a number of chunks, packed.
Such a word only grows, and only one rank writes it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

from asyncddp.shm.arena import (
    STORES_ORDERED,
    Arena,
    MappedChunk,
    SharedMemoryHandle,
    handle_of_block,
    store_fence,
)
from asyncddp.shm.chunk_layout import ChunkLayout
from asyncddp.shm.ring_header import (
    CYCLE,
    DESCRIPTOR,
    LINE,
    MASK,
    OFFSET,
    SIZE,
    acknowledgement_word,
    header_words,
    mask_word,
)
from asyncddp.shm.slot_count_tuner import FEW, SlotCountTuner

_BITS = 24
_CHUNK_BITS = (1 << _BITS) - 1
_ALL_READ = (1 << 63) - 1  # acknowledges the chunks of all steps
_Readers: TypeAlias = tuple[tuple[int, int], ...]  # ranks, and where each acknowledges


def pack_progress(step: int, chunks: int) -> int:
    """Pack a step and its number of chunks into one progress word; zero precedes all steps."""
    return (step + 1) << _BITS | chunks


def unpack_step(value: int) -> int:
    """Extract the step from a progress word; -1 before the first step."""
    return (value >> _BITS) - 1


def unpack_chunks(value: int) -> int:
    """Extract the number of chunks from a progress word."""
    return value & _CHUNK_BITS


class _RingBufferLayout:
    """Base class of both ends of a ring buffer: views of its header and slots."""

    def __init__(self, view: MappedChunk, offset: int, ranks: int, layout: ChunkLayout) -> None:
        self.layout = layout
        header = header_words(ranks)
        self.words = view.words(offset, header)
        halves = 1 + layout.doubled
        sizes, numbers = (halves, layout.num_slots, layout.chunk_numel), range(layout.num_slots)
        every = view.tensor(offset + 8 * header, sizes, layout.dtype)
        self.slots = tuple(
            tuple(every[half % halves, number] for number in numbers) for half in (0, 1)
        )
        whole = layout.num_chunks == 1
        self.whole_slots = tuple(half[0].view(layout.shape) for half in self.slots) if whole else ()
        """The slots in the tensor's own shape, if it is a single chunk; else empty."""

    def slot(self, step: int, number: int) -> torch.Tensor:
        """Return the slot of one chunk of a step."""
        layout, half = self.layout, step & 1
        slot = self.slots[half][number % self.words[LINE * half + CYCLE]]
        last = number == layout.num_chunks - 1 and layout.num_chunks > 1
        return slot[: layout.numel - number * layout.chunk_numel] if last else slot

    @staticmethod
    def nbytes(ranks: int, layout: ChunkLayout) -> int:
        """Compute the size of a ring buffer in bytes."""
        slots = (1 + layout.doubled) * layout.num_slots * layout.chunk_numel
        return 8 * header_words(ranks) + slots * layout.dtype.itemsize


class SendRingBuffer(_RingBufferLayout):
    """Sending end of a ring buffer: this rank writes tensors for peers on its machine.

    ``ranks`` are the ranks of the machine, in the same order on all of them.
    """

    def __init__(
        self,
        arena: Arena,
        ranks: tuple[int, ...],
        layout: ChunkLayout,
        cycle: SlotCountTuner | None = None,
    ) -> None:
        number = len(ranks)
        block = arena.take(self.nbytes(number, layout), zeroed=8 * header_words(number))
        self.handle = handle_of_block(block)
        super().__init__(block.chunk, block.offset, number, layout)
        self._ranks = ranks
        self.mask_words = mask_word(number, 0), mask_word(number, 1)
        self._notify: Callable[[int], None] | None = None
        self._readers: list[tuple[int, _Readers]] = [(-1, ()), (-1, ())]
        self._masks: dict[tuple[int, ...], tuple[tuple[int, ...], _Readers]] = {}
        self._cycle = cycle or SlotCountTuner()
        self.cycle = layout.num_slots  # slots that the current step goes round in
        self._copies: list[float] = []

    def notify_readers_by(self, notify: Callable[[int], None] | None) -> None:
        """Set a function that is called with each reader after publishing; None if readers poll."""
        self._notify = notify

    def reaches(self, rank: int) -> bool:
        """Return whether a rank can map this ring buffer."""
        index = bisect_left(self._ranks, rank)
        return index < len(self._ranks) and self._ranks[index] == rank

    def release_reader(self, rank: int) -> None:
        """Acknowledge all chunks, also later ones, in place of a reader that has left."""
        index = bisect_left(self._ranks, rank)
        self.words[acknowledgement_word(len(self._ranks), index)] = _ALL_READ

    def admit_reader(self, rank: int) -> None:
        """Wait again until a reader has read later chunks, in a new process."""
        index, latest = bisect_left(self._ranks, rank), max(step for step, _ in self._readers)
        word = 0 if latest < 0 else pack_progress(latest, self.layout.num_chunks)
        self.words[acknowledgement_word(len(self._ranks), index)] = word

    def has_room(self, step: int) -> bool:
        """Return whether this step's slots are free: all readers have read their earlier data."""
        layout, words = self.layout, self.words
        if not layout.doubled:
            return not self._late_readers()
        earlier, readers = self._readers[step & 1]
        done = (earlier + 1) << _BITS | layout.num_chunks
        return all([words[index] >= done for _, index in readers])

    def _late_readers(self) -> list[tuple[int, int]]:
        """List the readers with unread chunks, each with the step of these chunks."""
        chunks, words = self.layout.num_chunks, self.words
        return [
            (rank, step)
            for step, readers in self._readers
            for rank, index in readers
            if words[index] < pack_progress(step, chunks)
        ]

    def begin(
        self, step: int, targets: tuple[int, ...], handle: SharedMemoryHandle | None = None
    ) -> None:
        """Begin a step: write its readers and, if the tensor is not in the slots, its handle."""
        known = self._masks.get(targets)
        if known is None:
            known = self._masks[targets] = self._address(targets)
        mask, readers = known
        words, line = self.words, LINE * (step & 1)
        words[line] = pack_progress(step, 0)  # first, so that no reader mixes up two steps
        store_fence()
        words[line + DESCRIPTOR] = 0
        if handle is not None:
            words[line + DESCRIPTOR] = handle.descriptor + 1
            words[line + SIZE], words[line + OFFSET] = handle.size, handle.offset
        else:
            if self.layout.num_slots > FEW:
                self.cycle, self._copies = min(self.layout.num_slots, self._cycle.next()), []
            words[line + CYCLE] = self.cycle
        first = self.mask_words[step & 1]
        for index, bits in enumerate(mask):
            words[first + index] = bits
        self._readers[step & 1] = step, readers

    def _address(self, targets: tuple[int, ...]) -> tuple[tuple[int, ...], _Readers]:
        """Build the bit mask of some readers, and look up their acknowledgement words."""
        number = len(self._ranks)
        mask = [0] * -(-number // 64)
        places = [bisect_left(self._ranks, target) for target in targets]
        for index in places:
            mask[index // 64] |= 1 << index % 64
        words = [acknowledgement_word(number, index) for index in places]
        return tuple(mask), tuple(zip(targets, words, strict=True))

    def try_send(self, step: int, targets: tuple[int, ...], tensor: torch.Tensor) -> bool:
        """Send a one-chunk tensor if its slot is free; return whether it was sent."""
        if not self.has_room(step):
            return False
        self.open_slot(step, targets).copy_(tensor)
        self.publish_whole(step)
        return True

    def open_slot(self, step: int, targets: tuple[int, ...]) -> torch.Tensor:
        """Begin a step of one chunk, and return its slot, which must be free, to be written."""
        half = step & 1
        known = self._masks.get(targets)
        if (
            known is None
            or known[1] is not self._readers[half][1]
            or self.words[LINE * half + DESCRIPTOR]
        ):
            self.begin(step, targets)
        else:
            self._readers[half] = step, known[1]
        return self.whole_slots[half]

    def publish_whole(self, step: int) -> None:
        """Publish the chunk of a one-chunk step to its readers."""
        if not STORES_ORDERED:
            store_fence()
        self.words[LINE * (step & 1)] = (step + 1) << _BITS | 1
        if self._notify is not None:
            self._notify_readers(step)

    def send_chunk(self, step: int, number: int, chunk: torch.Tensor, factor: float = 1.0) -> None:
        """Copy one chunk, multiplied by a factor, into its free slot, and publish it."""
        slot, begun = self.slot(step, number), time.perf_counter()
        if factor == 1.0:
            slot.copy_(chunk)
        else:
            torch.mul(chunk, factor, out=slot)
        if self.layout.num_slots > FEW and self._cycle.tries:
            self._copies.append(time.perf_counter() - begun)
            if number + 1 == self.layout.num_chunks:
                self._cycle.record(self.cycle, self._copies)
        self.publish(step, number + 1)

    def publish(self, step: int, chunks: int) -> None:
        """Publish the first ``chunks`` chunks of a step to its readers."""
        store_fence()
        self.words[LINE * (step & 1)] = pack_progress(step, chunks)
        if self._notify is not None:
            self._notify_readers(step)

    def _notify_readers(self, step: int) -> None:
        for reader, _ in self._readers[step & 1][1]:
            if self._notify is not None:
                self._notify(reader)

    def pending_readers(self, step: int, chunks: int) -> list[tuple[int, int]]:
        """List the readers that have not read ``chunks`` chunks of a step, or an earlier step."""
        published, readers = self._readers[step & 1]
        if published != step and not self.layout.doubled:
            return self._late_readers()
        goal = pack_progress(published, chunks if published == step else self.layout.num_chunks)
        return [(rank, published) for rank, index in readers if self.words[index] < goal]


class ReceiveRingBuffer(_RingBufferLayout):
    """Receiving end of a ring buffer: this rank reads the tensors that a peer writes."""

    def __init__(
        self, view: MappedChunk, offset: int, ranks: tuple[int, ...], rank: int, layout: ChunkLayout
    ) -> None:
        super().__init__(view, offset, len(ranks), layout)
        index, number = bisect_left(ranks, rank), len(ranks)
        self._acknowledged = acknowledgement_word(number, index)
        self._masks = tuple(mask_word(number, half) + index // 64 for half in (0, 1))
        self._bit = 1 << index % 64
        self._notify: Callable[[], None] | None = None

    def notify_sender_by(self, notify: Callable[[], None] | None) -> None:
        """Set a function that is called after each acknowledgement; None if the sender polls."""
        self._notify = notify

    def read_whole(self, step: int) -> torch.Tensor | None:
        """Return the slot of a one-chunk step if it is published for this rank, else None."""
        words, half = self.words, step & 1
        line = LINE * half
        if words[line] != (step + 1) << _BITS | 1:
            return None
        if not STORES_ORDERED:
            store_fence()
        if not words[self._masks[half]] & self._bit or words[line + DESCRIPTOR]:
            return None
        return self.whole_slots[half] if words[line] == (step + 1) << _BITS | 1 else None

    def published(self, step: int) -> int:
        """Return the number of published chunks of a step."""
        value = self.words[LINE * (step & 1)]
        store_fence()
        return unpack_chunks(value) if unpack_step(value) == step else 0

    def is_addressed(self, step: int) -> bool:
        """Return whether this rank is among the readers of a published step."""
        words, line = self.words, LINE * (step & 1)
        meant = words[self._masks[step & 1]] & self._bit
        store_fence()
        return bool(meant) and unpack_step(words[line]) == step

    def tensor_handle(self, step: int) -> SharedMemoryHandle | None:
        """Return the handle of a step's tensor; None if the tensor is in the slots."""
        line = LINE * (step & 1)
        descriptor, size, offset = self.words[line + DESCRIPTOR : line + MASK]
        return SharedMemoryHandle(descriptor - 1, size, offset) if descriptor else None

    def acknowledge(self, step: int, chunks: int) -> None:
        """Acknowledge to the sender that the first ``chunks`` chunks of a step have been read."""
        if not STORES_ORDERED:
            store_fence()
        self.words[self._acknowledged] = (step + 1) << _BITS | chunks
        if self._notify is not None:
            self._notify()

    def unread_steps(self) -> Iterable[int]:
        """Yield the published steps with chunks for this rank that it has not read."""
        for half in (0, 1):
            value = self.words[LINE * half]
            store_fence()
            step, unread = unpack_step(value), self.words[self._acknowledged] < value
            if unpack_chunks(value) and unread and self.is_addressed(step):
                yield step
