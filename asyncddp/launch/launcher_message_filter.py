"""Filter that separates a launcher's own failure messages from the output of the ranks.

Bytes are fed in, and the ranks' bytes are returned at once and in order. Only bytes that may belong
to a launcher's message are buffered, until :meth:`LauncherMessageFilter.flush`.
"""

from __future__ import annotations

import re
import time

from asyncddp.launch.launchers import LauncherOutputPatterns
from asyncddp.rank_list_text import list_ranks, parse_ranks

_LONGEST_BLOCK = 40  # lines; a longer one is no launcher's
_LONGEST_LINE = 4096  # bytes
_RUN = re.compile(rb" ?[-=]+ *$")
_WAIT_WARNING = re.compile(
    r"rank (?P<rank>\d+): (?P<what>.+) has been waiting for (?P<seconds>\d+) s; "
    r"missing: (?P<missing>ranks? [\d, \u2013]+?)( and \d+ more)?"
)
_COLLECTION_TIME = 1.5  # seconds from the first warning until all are shown


class WaitWarningAggregator:
    """Collector of the ranks' "has been waiting" warnings, merged after a short delay.

    Where one rank is late, its neighbours wait for it and theirs for them, and each prints a
    warning: one line says instead that ``2 ranks (0, 1) wait for rank 2, in barrier, since 60 s``.
    """

    def __init__(self) -> None:
        self.pending: list[re.Match[str]] = []
        self._since = 0.0

    @property
    def due(self) -> bool:
        """True if the oldest collected warning has been held long enough to be shown."""
        return bool(self.pending) and time.monotonic() - self._since >= _COLLECTION_TIME

    def add(self, line: str) -> bool:
        """Collect a line if it is a waiting warning; return whether it was one."""
        match = _WAIT_WARNING.fullmatch(line)
        if match is not None:
            self._since = self._since if self.pending else time.monotonic()
            self.pending.append(match)
        return match is not None

    def flush(self) -> list[str]:
        """Return one merged line, or all lines unchanged if they have no common cause."""
        held, self.pending = self.pending, []
        waits = [(int(one["rank"]), {*parse_ranks(one["missing"])}, one["what"]) for one in held]
        waiting = {rank for rank, _, _ in waits}
        late = {peer for _, missing, _ in waits for peer in missing} - waiting
        if len(waiting) < 2 or not late:
            return [one[0] for one in held]
        _, _, what = min((one for one in waits if one[1] & late), key=lambda one: one[0])
        who = list_ranks(waiting).partition(" ")[2]
        since = max(int(one["seconds"]) for one in held)
        return [
            f"{len(waiting)} ranks ({who}) wait for {list_ranks(late)}, in {what}, since {since} s"
        ]


class LauncherMessageFilter:
    """Stream filter that separates the ranks' output from the launcher's failure messages.

    With ``pass_through`` the launcher's lines stay in the output and are only recorded; without
    ``wait_warnings`` the ranks' waiting warnings stay there.
    """

    def __init__(
        self,
        output_patterns: LauncherOutputPatterns | None = None,
        *,
        pass_through: bool = False,
        wait_warnings: WaitWarningAggregator | None = None,
    ) -> None:
        self._patterns = LauncherOutputPatterns() if output_patterns is None else output_patterns
        self._wait_warnings, self._pass_through = wait_warnings, pass_through
        prefixes = () if wait_warnings is None or not self._patterns.line_prefixes else ("rank ",)
        self._line_prefixes = (*self._patterns.line_prefixes, *prefixes)
        self._pending = b""
        self._block: list[bytes] = []
        self._after_block = False
        self.at_line_start = True  # the output so far ends with a newline
        self.launcher_lines: list[str] = []

    @property
    def has_pending(self) -> bool:
        """True if bytes or warnings are buffered."""
        waits = self._wait_warnings
        return bool(self._pending or self._block or (waits and waits.pending))

    def due_warnings(self, *, at_end: bool = False) -> bytes:
        """Return the merged waiting warnings once their collection time is over."""
        waits = self._wait_warnings
        if waits is None or not (waits.due or (at_end and waits.pending)):
            return b""
        out: list[bytes] = [] if self.at_line_start else [b"\n"]
        self._emit("".join(f"{line}\n" for line in waits.flush()).encode(), out)
        return b"".join(out)

    def feed(self, data: bytes) -> bytes:
        """Process some bytes; return the part that is certainly output of the ranks."""
        self._pending += data
        out: list[bytes] = []
        self._drop_terminator()
        while b"\n" in self._pending:
            line, _, self._pending = self._pending.partition(b"\n")
            self._classify(line + b"\n", out)
            self._drop_terminator()
        if not self._block:
            free = len(self._pending) - self._buffered_length(self._pending)
            self._emit(self._pending[:free], out)
            self._pending = self._pending[free:]
        return b"".join(out)

    def flush(self) -> bytes:
        """Return all buffered bytes, after a pause or at the end of the stream."""
        out: list[bytes] = []
        self._emit(b"".join(self._block) + self._pending, out)
        self._block, self._pending = [], b""
        return b"".join(out)

    def _drop_terminator(self) -> None:
        """Drop the NUL byte that PRRTE writes after some of its blocks."""
        if self._after_block and self._pending:
            self._after_block = False
            self._pending = self._pending.removeprefix(b"\0")

    def _emit(self, data: bytes, out: list[bytes]) -> None:
        if data:
            out.append(data)
            self.at_line_start = data.endswith(b"\n")

    def _record(self, said: bytes, out: list[bytes]) -> None:
        self.launcher_lines += said.decode(errors="replace").splitlines()
        if self._pass_through:
            self._emit(said, out)

    def _buffered_length(self, begun: bytes) -> int:
        """Return how many bytes of an incomplete line may be a launcher's message."""
        if len(begun) >= _LONGEST_LINE:
            return 0
        text = begun.decode(errors="replace")
        prefixes = self._line_prefixes if self.at_line_start and text and "\r" not in text else ()
        if any(text.startswith(prefix) or prefix.startswith(text) for prefix in prefixes):
            return len(begun)
        run = _RUN.search(begun) if self._patterns.delimiter is not None else None
        return 0 if run is None else len(run[0])

    def _classify(self, line: bytes, out: list[bytes]) -> None:
        """Classify one line, or the remainder of a line whose beginning was already returned."""
        text = line.decode("latin-1").rstrip("\r\n")
        if self._block:
            self._continue_block(line, text, out)
            return
        delimiter = self._patterns.delimiter and self._patterns.delimiter.search(text)
        if delimiter is not None:  # a progress bar without an end of line may stand before it
            self._emit(line[: delimiter.start()], out)
            self._block = [line[delimiter.start() :]]
        elif self.at_line_start and any(one.fullmatch(text) for one in self._patterns.lines):
            self._record(line, out)
        else:
            words = line.decode(errors="replace").rstrip("\r\n")
            waits = self._wait_warnings if self.at_line_start else None
            if waits is None or not waits.add(words):
                self._emit(line, out)

    def _continue_block(self, line: bytes, text: str, out: list[bytes]) -> None:
        if len(self._block) == 1 and not any(p.match(text) for p in self._patterns.block_starts):
            self._emit(self._block.pop(), out)  # a fence of the user's own
            self._classify(line, out)
            return
        self._block.append(line)
        delimiter = self._patterns.delimiter
        at_end = delimiter is not None and delimiter.fullmatch(text) is not None
        if at_end or len(self._block) > _LONGEST_BLOCK:
            (self._record if at_end else self._emit)(b"".join(self._block), out)
            self._block, self._after_block = [], at_end
