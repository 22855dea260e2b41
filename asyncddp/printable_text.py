"""Escaping of control characters in text, so that it cannot control a terminal."""

from __future__ import annotations

import logging
import re

_OBEYED = re.compile(r"[^\n\t -~\xa0-\U0010ffff]")  # control characters, but for line ends and tabs


def printable(text: str) -> str:
    r"""Escape control characters, such as those that move a terminal's cursor.

    Example:
        >>> print(printable("red: \x1b[31m"))
        red: \x1b[31m
    """
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _EscapingFilter(logging.Filter):
    """Log filter that escapes control characters, because records may quote other ranks."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if (safe := printable(text)) != text:
            record.msg, record.args = safe, ()
        return True


logging.getLogger("asyncddp").addFilter(_EscapingFilter())
