"""Gate of the tree's size: code lines by room, files, and long files, held to a budget.

Code lines are those without docstring, comment, blank line and import.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

BUDGET = Path("scripts/lib/size_budget.toml")
LONG = 350  # lines of a file, all told
TREES = {"asyncddp": 32_000, "tests": 40_000, "scripts": 4_500}
"""The aim in code lines of each tree."""
_KINDS = {"code_lines": "code lines", "files": "files", "long_files": f"files over {LONG} lines"}
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a module and all statements in it; expressions hold neither imports nor docstrings."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, name, ())
            pending += inside if isinstance(inside, list) else ()


def _lines_with_code(source: str, *, strings: bool) -> set[int]:
    """Return the lines that hold a token, and all lines of long strings if there are any."""
    if not strings:
        lines = enumerate(map(str.strip, source.split("\n")), 1)
        return {number for number, line in lines if line and not line.startswith("#")}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT and token.type != tokenize.COMMENT:
            found.update(range(token.start[0], token.end[0] + 1))
    return found


def code_lines(source: str) -> int:
    """Return how many lines of a module hold code."""
    left_out: set[int] = set()
    documented = 0
    for node in _statements(ast.parse(source)):
        text: Any = node if isinstance(node, ast.Import | ast.ImportFrom) else None
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            documented += 1
        if text is not None:
            left_out.update(range(text.lineno, text.end_lineno + 1))
    strings = source.count('"""') + source.count("'''") != 2 * documented
    return len(_lines_with_code(source, strings=strings) - left_out)


def sizes(root: Path) -> dict[str, Counter[str]]:
    """Return code lines by room, and the numbers of files and of long files by tree."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in _KINDS}
    rooms, sources = [], []
    for tree in TREES:
        for path in sorted((root / tree).rglob("*.py")):
            inside = path.relative_to(root / tree).parts
            room = f"{tree}/{inside[0] if len(inside) > 1 else '(top)'}"
            rooms.append(room if tree == "asyncddp" else tree)
            sources.append(path.read_text(encoding="utf-8"))
            found["files"][tree] += 1
            found["long_files"][tree] += sources[-1].count("\n") > LONG
    with ProcessPoolExecutor() as pool:  # parsing takes seconds
        for room, count in zip(rooms, pool.map(code_lines, sources, chunksize=32), strict=True):
            found["code_lines"][room] += count
    return found


def main() -> None:
    """Write the table for the tree in the current folder; exit with 1 above a budget."""
    budget = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    excess = []
    for kind, rooms in sizes(Path()).items():
        title = _KINDS[kind]
        sys.stdout.write(f"{title:<28}{'now':>8}{'budget':>8}{'aim':>8}\n")
        if kind == "code_lines":
            every = sum(size for room, size in rooms.items() if "/" in room)
            sys.stdout.write(
                f"  {'asyncddp, all rooms':<26}{every:>8}{'':>8}{TREES['asyncddp']:>8}\n"
            )
        for room, size in sorted(rooms.items(), key=lambda one: (one[0] in TREES, one[0])):
            most = budget.get(kind, {}).get(room, 0)
            aim = TREES.get(room, "") if kind == "code_lines" else ""
            sys.stdout.write(f"  {room:<26}{size:>8}{most:>8}{aim:>8}\n")
            if size > most:
                excess.append(f"{room} has {size} {title}, and its budget is {most}")
    if excess:
        remedy = f"make it smaller, or change {BUDGET} in the same commit and say why"
        sys.exit("\n".join([*excess, remedy]))


if __name__ == "__main__":
    main()
