"""Takes a launcher's own lines about a failure out of a stream, and nothing else.

No input or output here: bytes are fed in, and what is not the launcher's comes out at once and in
order. Only what may turn out to be the launcher's is held back, and :meth:`Sieve.release` gives it.
"""

from __future__ import annotations

import re

from asyncddp.launch.vendors import Noise
from asyncddp.launch.waits import WAITING, Waits

__all__ = ["Sieve"]

_LONGEST_BLOCK = 40  # lines; a longer one is no launcher's
_LONGEST_LINE = 4096  # bytes
_RUN = re.compile(rb" ?[-=]+ *$")


class Sieve:
    r"""Splits a stream into what the ranks wrote and what the launcher says of a failure.

    Args:
        noise: How the launcher's lines look; nothing is taken out without it.
        keep: Let the launcher's lines come through too, and take note of them only.
        waits: What gathers ranks' warnings that they wait; they come through where that is None.

    Attributes:
        notes: What the launcher said, line by line.
        at_start: Whether what has come through so far ends with the end of a line.

    Example:
        >>> import re
        >>> sieve = Sieve(Noise(lines=(re.compile("launcher: .*"),), stems=("launcher: ",)))
        >>> sieve.feed(b"loss 0.1\nlauncher: rank 2 died\nlo")
        b'loss 0.1\nlo'
        >>> sieve.notes
        ['launcher: rank 2 died']
    """

    def __init__(
        self, noise: Noise | None = None, *, keep: bool = False, waits: Waits | None = None
    ) -> None:
        self._noise = Noise() if noise is None else noise
        self._waits = waits
        self._keep = keep
        self._pending = b""
        self._block: list[bytes] = []
        self.at_start = True
        self.notes: list[str] = []

    @property
    def holds(self) -> bool:
        """Whether something is held back."""
        return bool(self._pending or self._block or (self._waits and self._waits.holds))

    def due(self, *, at_end: bool = False) -> bytes:
        """Give the warnings of ranks that wait, once they have been gathered."""
        if self._waits is None or not (self._waits.due or (at_end and self._waits.holds)):
            return b""
        out: list[bytes] = [] if self.at_start else [b"\n"]
        self._pass("".join(f"{line}\n" for line in self._waits.release()).encode(), out)
        return b"".join(out)

    def feed(self, data: bytes) -> bytes:
        """Take in some bytes and give those that can go on."""
        self._pending += data
        out: list[bytes] = []
        while b"\n" in self._pending:
            line, _, self._pending = self._pending.partition(b"\n")
            self._take(line + b"\n", out)
        if not self._block:
            free = len(self._pending) - self._held(self._pending)
            self._pass(self._pending[:free], out)
            self._pending = self._pending[free:]
        return b"".join(out)

    def release(self) -> bytes:
        """Give everything that is held back: the writer has paused, or the stream has ended."""
        out: list[bytes] = []
        self._pass(b"".join(self._block) + self._pending, out)
        self._block, self._pending = [], b""
        return b"".join(out)

    def _pass(self, data: bytes, out: list[bytes]) -> None:
        if data:
            out.append(data)
            self.at_start = data.endswith(b"\n")

    def _note(self, said: bytes, out: list[bytes]) -> None:
        self.notes += said.decode(errors="replace").splitlines()
        if self._keep:
            self._pass(said, out)

    def _held(self, begun: bytes) -> int:
        """How many bytes at the end of an unfinished line may turn out to be the launcher's."""
        if len(begun) >= _LONGEST_LINE:
            return 0
        text = begun.decode(errors="replace")
        stems = self._noise.stems if self.at_start and text and "\r" not in text else ()
        stems = (*stems, "rank ") if stems and self._waits is not None else stems
        if any(text.startswith(stem) or stem.startswith(text) for stem in stems):
            return len(begun)
        run = _RUN.search(begun) if self._noise.fence is not None else None
        return 0 if run is None else len(run[0])

    def _take(self, line: bytes, out: list[bytes]) -> None:
        """Decide about one line, or the end of one whose beginning has come through."""
        text = line.decode("latin-1").rstrip("\r\n")
        if self._block:
            self._continue_block(line, text, out)
            return
        fence = self._noise.fence.search(text) if self._noise.fence is not None else None
        if fence is not None:  # a progress bar without an end of line may stand before it
            self._pass(line[: fence.start()], out)
            self._block = [line[fence.start() :]]
        elif self.at_start and any(pattern.fullmatch(text) for pattern in self._noise.lines):
            self._note(line, out)
        elif self.at_start and self._is_wait(line):
            pass
        else:
            self._pass(line, out)

    def _is_wait(self, line: bytes) -> bool:
        """Whether it is the warning of a rank that waits, which is gathered then."""
        text = line.decode(errors="replace").rstrip("\r\n")
        if self._waits is None or not WAITING.fullmatch(text):
            return False
        self._waits.add(text)
        return True

    def _continue_block(self, line: bytes, text: str, out: list[bytes]) -> None:
        if len(self._block) == 1 and not any(p.match(text) for p in self._noise.openings):
            self._pass(self._block.pop(), out)  # a fence of the user's own
            self._take(line, out)
            return
        self._block.append(line)
        fence = self._noise.fence
        if fence is not None and fence.fullmatch(text):
            self._note(b"".join(self._block), out)
            self._block = []
        elif len(self._block) > _LONGEST_BLOCK:
            self._pass(b"".join(self._block), out)
            self._block = []
