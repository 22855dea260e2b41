"""Takes a launcher's own lines about a failure out of a stream, and nothing else.

No input or output here: bytes are fed in, and what is not the launcher's comes out at once and in
order. Only what may turn out to be the launcher's is held back, and :meth:`Sieve.release` gives it.
"""

from __future__ import annotations

from asyncddp.launch.vendors import Noise

__all__ = ["Sieve"]

_LONGEST_BLOCK = 40  # lines; a longer one is no launcher's
_LONGEST_LINE = 4096  # bytes


class Sieve:
    r"""Splits a stream into what the ranks wrote and what the launcher says of a failure.

    Args:
        noise: How the launcher's lines look; nothing is taken out without it.

    Attributes:
        notes: What was taken out, line by line.

    Example:
        >>> import re
        >>> sieve = Sieve(Noise(lines=(re.compile("launcher: .*"),), stems=("launcher: ",)))
        >>> sieve.feed(b"loss 0.1\nlauncher: rank 2 died\nlo")
        b'loss 0.1\nlo'
        >>> sieve.notes
        ['launcher: rank 2 died']
    """

    def __init__(self, noise: Noise | None = None) -> None:
        self._noise = Noise() if noise is None else noise
        self._pending = b""
        self._block: list[bytes] = []
        self._at_start = True
        self.notes: list[str] = []

    @property
    def holds(self) -> bool:
        """Whether something is held back."""
        return bool(self._pending or self._block)

    def feed(self, data: bytes) -> bytes:
        """Take in some bytes and give those that can go on."""
        self._pending += data
        out: list[bytes] = []
        while self._pending:
            line, newline, rest = self._pending.partition(b"\n")
            if not newline and self._may_be_noise(line):
                break
            self._pending = rest
            self._take(line + newline, out)
        return b"".join(out)

    def release(self) -> bytes:
        """Give everything that is held back: the writer has paused, or the stream has ended."""
        held = b"".join(self._block) + self._pending
        self._block, self._pending = [], b""
        if held:
            self._at_start = held.endswith(b"\n")
        return held

    def _may_be_noise(self, start: bytes) -> bool:
        """Whether a line that has only begun must wait for its end."""
        if self._block:
            return len(start) < _LONGEST_LINE
        if not self._at_start or len(start) >= _LONGEST_LINE or b"\r" in start:
            return False
        text = start.decode(errors="replace")
        begins = any(text.startswith(stem) or stem.startswith(text) for stem in self._noise.stems)
        return begins or (self._noise.fence is not None and not text.strip(" -="))

    def _take(self, line: bytes, out: list[bytes]) -> None:
        """Decide about one line, or about the piece of a line that is surely not noise."""
        text = line.decode(errors="replace").rstrip("\r\n")
        at_start, self._at_start = self._at_start, line.endswith(b"\n")
        fence = self._noise.fence
        if self._block:
            self._continue_block(line, text, out)
        elif not at_start:
            out.append(line)
        elif fence is not None and fence.fullmatch(text):
            self._block = [line]
        elif any(pattern.fullmatch(text) for pattern in self._noise.lines):
            self.notes.append(text)
        else:
            out.append(line)

    def _continue_block(self, line: bytes, text: str, out: list[bytes]) -> None:
        fence = self._noise.fence
        if len(self._block) == 1 and not any(p.match(text) for p in self._noise.openings):
            out.append(self._block.pop())  # a fence of the user's own
            self._at_start = True
            self._take(line, out)
            return
        self._block.append(line)
        if fence is not None and fence.fullmatch(text):
            self.notes += b"".join(self._block).decode(errors="replace").splitlines()
            self._block = []
        elif len(self._block) > _LONGEST_BLOCK:
            out += self._block
            self._block = []
