"""The code blocks of a Markdown page, and what the words after their language ask of a test.

======================  ==========================================================================
``python``              a whole script: runs on one rank; a comment after ``print(…)`` is its output
``python file=NAME``    the same, and NAME in the page's folder, where commands find it
``python ranks``        runs by a command of the page only, since one rank has no neighbours
``python in=NAME``      lines that run in the page's script NAME, in place of its ``# here`` line
``python cells``        cells of a notebook, with ``# %%`` between them: run in IPython
``bash``                commands that run in the page's folder
``bash parsed``         commands for machines that are not here: our own command line reads them
``bash fails``          commands that end with an error
``bash file=NAME``      a script for a batch system, read in the same way
``text output``         what the block above prints; ``...`` stands for anything
``text figures``        the same, with any numbers in place of those that are shown
``text unordered``      the same, of ranks that print in any order
``text``                a picture in letters, a tree, a message: read by people only
``diff``                two scripts: the old one can be compiled, the new one runs
``diff ranks``          the same, but that the new one runs by a command of the page; with file=NAME
``diff ranks patch``    parts of a diff against the page's script base=NAME, ``@@`` between them
======================  ==========================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from markdown_it import MarkdownIt

__all__ = ["PAGES", "REPO", "Block", "blocks_of", "prose_of"]

REPO = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    *sorted(str(page.relative_to(REPO)) for page in (REPO / "docs").rglob("*.md")),
]
PAGES.remove("docs/benchmarks-developers.md")  # what a bench printed, with the command above each


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, the words after that, and its text."""

    page: str
    line: int
    language: str
    marks: frozenset[str]
    text: str

    @property
    def file(self) -> str | None:
        """The name under which it lies in the page's folder."""
        return self._value("file")

    @property
    def script(self) -> str:
        """The script that it is: a diff's new side, a patched script, or one with it in place."""
        if self.language == "diff":
            return self._patched() if "patch" in self.marks else self.side("+")
        outer = self._value("in")
        return self.text if outer is None else self._within(outer)

    def _within(self, name: str) -> str:
        """The page's script of that name with this block in place of its ``# here`` line."""
        (outer,) = [block.text for block in blocks_of(self.page) if block.file == name]
        (place,) = re.findall(r"^.*# here$", outer, flags=re.MULTILINE)
        margin = place[: len(place) - len(place.lstrip())]
        return outer.replace(place, indent(self.text, margin).rstrip())

    def side(self, sign: str) -> str:
        """The new side of a diff, ``"+"``, or the old one, ``"-"``."""
        return _side(self.text, sign)

    def _value(self, key: str) -> str | None:
        found = [mark.partition("=")[2] for mark in self.marks if mark.startswith(f"{key}=")]
        return found[0] if found else None

    def _patched(self) -> str:
        """The script of the page that the parts are of, with each part at its only place."""
        base = self._value("base")
        script = next(one.script for one in blocks_of(self.page) if one.file == base)
        for part in re.split(r"^@@.*\n", self.text, flags=re.MULTILINE):
            old, new = _side(part, "-"), _side(part, "+")
            assert script.count(old) == 1, f"{self}: {base} has {script.count(old)} times:\n{old}"
            script = script.replace(old, new)
        return script

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _side(text: str, sign: str) -> str:
    left_out = "-" if sign == "+" else "+"
    lines = text.splitlines()
    return "".join(f"{line[1:]}\n" for line in lines if not line.startswith(left_out))


def blocks_of(page: str) -> list[Block]:
    """All code blocks of a page but those that are read by the site's builder, ``{…}``."""
    tokens = MarkdownIt("commonmark").parse((REPO / page).read_text(encoding="utf-8"))
    blocks = []
    for token in tokens:
        if token.type not in ("fence", "code_block") or token.info.startswith("{"):
            continue
        language, *marks = token.info.split() or [""]
        assert token.map is not None
        blocks.append(Block(page, token.map[0] + 1, language, frozenset(marks), token.content))
    return blocks


def prose_of(page: str) -> str:
    """A page's text with its code blocks."""
    return (REPO / page).read_text(encoding="utf-8")
