"""First lines of docstrings name their subject."""

import ast
from pathlib import Path

CLONE = Path(__file__).resolve().parents[2]
ROOMS = CLONE / "asyncddp", CLONE / "topology"  # the link to which rglob does not follow
QUESTIONS = ("What", "Whether", "How", "Where")


def test_no_first_line_is_a_question():
    """A noun or a verb tells a reader more than What, Whether, How or Where."""
    found = [
        f"{path.relative_to(CLONE)}:{node.lineno}: {node.value.value.splitlines()[0]}"
        for room in ROOMS
        for path in room.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and node.value.value.split(maxsplit=1)[:1]
        and node.value.value.split(maxsplit=1)[0] in QUESTIONS
    ]
    assert found == []
