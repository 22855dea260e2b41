"""Filters a launcher's own failure messages out of the output that the ranks print.

No input or output here: bytes are fed in, and the ranks' bytes are returned at once and in order.
Only bytes that may belong to a launcher's message are buffered, until :meth:`OutputFilter.flush`.
"""

from __future__ import annotations

import re

from asyncddp.launch.launchers import LauncherOutputPatterns
from asyncddp.launch.wait_warnings import WAIT_WARNING, WaitWarningAggregator

_LONGEST_BLOCK = 40  # lines; a longer one is no launcher's
_LONGEST_LINE = 4096  # bytes
_RUN = re.compile(rb" ?[-=]+ *$")


class OutputFilter:
    r"""Stream filter that separates the ranks' output from the launcher's failure messages.

    Args:
        output_patterns: Patterns of the launcher's messages; without them nothing is removed.
        pass_through: Leave the launcher's lines in the output and only record them.
        wait_warnings: Collector of the ranks' waiting warnings; None leaves them in the output.

    Attributes:
        launcher_lines: The launcher's messages, line by line.
        at_line_start: Whether the output so far ends with a newline.

    Example:
        >>> import re
        >>> lines = (re.compile("launcher: .*"),)
        >>> patterns = LauncherOutputPatterns(lines=lines, line_prefixes=("launcher: ",))
        >>> output_filter = OutputFilter(patterns)
        >>> output_filter.feed(b"loss 0.1\nlauncher: rank 2 died\nlo")
        b'loss 0.1\nlo'
        >>> output_filter.launcher_lines
        ['launcher: rank 2 died']
    """

    def __init__(
        self,
        output_patterns: LauncherOutputPatterns | None = None,
        *,
        pass_through: bool = False,
        wait_warnings: WaitWarningAggregator | None = None,
    ) -> None:
        self._patterns = LauncherOutputPatterns() if output_patterns is None else output_patterns
        self._wait_warnings = wait_warnings
        self._pass_through = pass_through
        self._pending = b""
        self._block: list[bytes] = []
        self.at_line_start = True
        self.launcher_lines: list[str] = []

    @property
    def has_pending(self) -> bool:
        """True if bytes or warnings are buffered."""
        return bool(
            self._pending
            or self._block
            or (self._wait_warnings and self._wait_warnings.has_pending)
        )

    def due_warnings(self, *, at_end: bool = False) -> bytes:
        """Return the merged waiting warnings once their collection time is over."""
        if self._wait_warnings is None or not (
            self._wait_warnings.due or (at_end and self._wait_warnings.has_pending)
        ):
            return b""
        out: list[bytes] = [] if self.at_line_start else [b"\n"]
        self._emit("".join(f"{line}\n" for line in self._wait_warnings.flush()).encode(), out)
        return b"".join(out)

    def feed(self, data: bytes) -> bytes:
        """Take some bytes and return those that are certainly the ranks' output."""
        self._pending += data
        out: list[bytes] = []
        while b"\n" in self._pending:
            line, _, self._pending = self._pending.partition(b"\n")
            self._classify(line + b"\n", out)
        if not self._block:
            free = len(self._pending) - self._buffered_length(self._pending)
            self._emit(self._pending[:free], out)
            self._pending = self._pending[free:]
        return b"".join(out)

    def flush(self) -> bytes:
        """Return all buffered bytes: the writer has paused, or the stream has ended."""
        out: list[bytes] = []
        self._emit(b"".join(self._block) + self._pending, out)
        self._block, self._pending = [], b""
        return b"".join(out)

    def _emit(self, data: bytes, out: list[bytes]) -> None:
        if data:
            out.append(data)
            self.at_line_start = data.endswith(b"\n")

    def _record(self, said: bytes, out: list[bytes]) -> None:
        self.launcher_lines += said.decode(errors="replace").splitlines()
        if self._pass_through:
            self._emit(said, out)

    def _buffered_length(self, begun: bytes) -> int:
        """Return how many bytes of an unfinished line may belong to a launcher's message."""
        if len(begun) >= _LONGEST_LINE:
            return 0
        text = begun.decode(errors="replace")
        line_prefixes = (
            self._patterns.line_prefixes if self.at_line_start and text and "\r" not in text else ()
        )
        line_prefixes = (
            (*line_prefixes, "rank ")
            if line_prefixes and self._wait_warnings is not None
            else line_prefixes
        )
        if any(text.startswith(stem) or stem.startswith(text) for stem in line_prefixes):
            return len(begun)
        run = _RUN.search(begun) if self._patterns.delimiter is not None else None
        return 0 if run is None else len(run[0])

    def _classify(self, line: bytes, out: list[bytes]) -> None:
        """Classify one line, or the rest of one whose beginning was already returned."""
        text = line.decode("latin-1").rstrip("\r\n")
        if self._block:
            self._continue_block(line, text, out)
            return
        delimiter = (
            self._patterns.delimiter.search(text) if self._patterns.delimiter is not None else None
        )
        if delimiter is not None:  # a progress bar without an end of line may stand before it
            self._emit(line[: delimiter.start()], out)
            self._block = [line[delimiter.start() :]]
        elif self.at_line_start and any(
            pattern.fullmatch(text) for pattern in self._patterns.lines
        ):
            self._record(line, out)
        elif self.at_line_start and self._collect_warning(line):
            pass
        else:
            self._emit(line, out)

    def _collect_warning(self, line: bytes) -> bool:
        """Collect a line that is a waiting warning; return whether it is one."""
        text = line.decode(errors="replace").rstrip("\r\n")
        if self._wait_warnings is None or not WAIT_WARNING.fullmatch(text):
            return False
        self._wait_warnings.add(text)
        return True

    def _continue_block(self, line: bytes, text: str, out: list[bytes]) -> None:
        if len(self._block) == 1 and not any(p.match(text) for p in self._patterns.block_starts):
            self._emit(self._block.pop(), out)  # a fence of the user's own
            self._classify(line, out)
            return
        self._block.append(line)
        delimiter = self._patterns.delimiter
        if delimiter is not None and delimiter.fullmatch(text):
            self._record(b"".join(self._block), out)
            self._block = []
        elif len(self._block) > _LONGEST_BLOCK:
            self._emit(b"".join(self._block), out)
            self._block = []
