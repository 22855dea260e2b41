"""Every code block of README.md and of the guides does what the page says that it does."""

from __future__ import annotations

import doctest
import os
import re
import subprocess

import pytest

from tests.docs.blocks import PAGES, blocks_of
from tests.docs.conftest import environment, name_of, run_python
from tests.docs.parsed_commands import check_script
from tests.support.processes import warm_server

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
LANGUAGES = {
    "python": {"cells", "ranks"},
    "bash": {"parsed", "fails"},
    "text": {"figures", "output", "unordered"},
    "diff": {"patch", "ranks"},
}
CELLS = """
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

config = Config({{"HistoryManager": {{"enabled": False}}, "ProfileDir": {{"location": "ipython"}}}})
shell = InteractiveShell.instance(config=config)
for cell in {cells!r}:
    shell.run_cell(cell).raise_error()
"""
FIGURE = r"\d[\d.]*(e[+-]?\d+)?|─+"  # numbers, and rules as wide as their columns
FRAMEWORKS = r"^\s*(from|import) (accelerate|lightning|sklearn|transformers)\b"
NIGHTLY = pytest.mark.nightly
LENIENT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def found(language, *marks, without=()):
    """The blocks of a language that have these marks, and none of the others."""
    return [
        block
        for block in BLOCKS
        if block.language == language
        and set(marks) <= block.marks
        and not set(without) & block.marks
    ]


def is_smoke(block, first):
    """Whether a block is the one of its page that ``scripts/test all`` runs."""
    frameworks = ("docs/guides/hugging-face.md", "docs/guides/lightning.md")
    return block is first[block.page] and block.page not in frameworks


def first_of_page(blocks):
    """Parameters of pytest: the first block of each page, and the others for ``nightly``.

    Frameworks have tests of their own.
    """
    first = {block.page: block for block in reversed(blocks)}
    return [
        pytest.param(
            block,
            id=name_of(block),
            marks=() if block.page == "README.md" or is_smoke(block, first) else NIGHTLY,
        )
        for block in blocks
    ]


def of(language, *marks, without=()):
    """The tests' blocks, as of :func:`found`."""
    return pytest.mark.parametrize("block", found(language, *marks, without=without), ids=name_of)


def is_run_by_a_command(script):
    """Whether a command that the tests run names a script: with fewer steps than by itself."""
    commands = found("bash", without=["parsed"])
    return script.file is not None and any(
        re.search(rf"(?<![\w./]){re.escape(script.file)}\b", command.text)
        for command in commands
        if command.page == script.page
    )


BY_THEMSELVES = [
    block for block in found("python", without=["cells", "ranks"]) if not is_run_by_a_command(block)
]


def printed_after(block):
    """The output that the page shows below a block, and the marks that say what is left open."""
    mine = [other for other in BLOCKS if other.page == block.page]
    following = mine[mine.index(block) + 1 :][:1]
    shown = [other for other in following if other.marks & LANGUAGES["text"]]
    return (shown[0].text, shown[0].marks) if shown else (None, frozenset())


def check_output(block, printed):
    """Compare what was printed with what the page shows, line by line where ranks print."""
    shown, marks = printed_after(block)
    if shown is None:
        return
    if "figures" in marks:
        shown, printed = (re.sub(FIGURE, "#", text) for text in (shown, printed))
    if "unordered" in marks:
        shown, printed = ("\n".join(sorted(text.splitlines())) for text in (shown, printed))
    same = doctest.OutputChecker().check_output(shown + "\n", printed + "\n", LENIENT)
    assert same, f"{block} shows\n{shown}\nbut prints\n{printed}"


def check_comments(block, printed):
    """``print(…)  # shown``: comments are lines that were printed, maybe with words after ": "."""
    lines = printed.splitlines()
    for shown in re.findall(r"^ *print\(.*\)  # (.*)$", block.script, flags=re.MULTILINE):
        found = [line for line in lines if shown == line or shown.startswith(f"{line}: ")]
        assert found, f"{block} says # {shown}, but prints\n{printed}"


def test_every_block_says_how_it_is_tested():
    """A page has no block whose language or marks these tests do not know."""
    unknown = [
        str(block)
        for block in BLOCKS
        if block.language not in LANGUAGES
        or {mark for mark in block.marks if "=" not in mark} - LANGUAGES[block.language]
    ]
    assert unknown == []
    assert len(BLOCKS) > 20


def test_output_stands_below_what_prints_it():
    """A block of output follows the block that prints it, which the tests run."""
    for page in PAGES:
        blocks = blocks_of(page)
        for above, block in zip([None, *blocks], blocks, strict=False):
            if block.language == "text" and block.marks & LANGUAGES["text"]:
                assert above is not None, block
                assert above.language in ("python", "bash"), block
                assert "parsed" not in above.marks, block


@pytest.mark.parametrize("block", first_of_page(BY_THEMSELVES))
def test_python_runs_on_one_rank(folder_of, block):
    """A block of Python is a whole script, which runs without a warning, or by a command."""
    code, printed = run_python(block.script, folder_of(block.page))
    assert code == 0, printed
    check_output(block, printed)
    check_comments(block, printed)


@of("python", "cells")
def test_cells_run_in_ipython(folder_of, block):
    """Cells run one after the other in IPython, which knows their magics."""
    script = CELLS.format(cells=[cell.strip() for cell in block.text.split("\n# %%\n")])
    code, printed = run_python(script, folder_of(block.page))
    assert code == 0, printed
    check_output(block, printed)


@pytest.mark.parametrize("block", [one for one in BLOCKS if "ranks" in one.marks], ids=name_of)
def test_scripts_for_several_ranks_are_run_by_a_command(block):
    """What needs several ranks has a command on its page that starts them."""
    commands = [one.text for one in blocks_of(block.page) if one.language == "bash"]
    assert block.file
    assert any(block.file in text for text in commands), block


@pytest.mark.parametrize("block", first_of_page(found("bash", without=["parsed"])))
def test_commands_run(folder_of, block):
    """Commands run in the page's folder, where its scripts lie; those marked ``fails`` fail."""
    environ = environment()
    page = "\n".join(one.text for one in blocks_of(block.page))
    server = warm_server(frameworks=re.search(FRAMEWORKS, page, re.MULTILINE) is not None)
    environ["PATH"] = os.pathsep.join([server.commands, environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder_of(block.page),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode != 0) is ("fails" in block.marks), done.stdout
    check_output(block, done.stdout)


@of("bash", "parsed")
def test_commands_for_other_machines_can_be_read(folder_of, block):
    """Commands for machines that are not here are read by bash and by our own command line."""
    check_script(block.text, folder_of(block.page))


@of("diff", without=["patch"])
def test_diffs_begin_at_a_script(block):
    """Both sides of a diff are Python."""
    for sign in "-+":
        compile(block.side(sign), str(block), "exec")


@of("diff", without=["ranks"])
def test_diffs_lead_to_a_script_that_runs(folder_of, block):
    """The new side runs on one rank and prints something."""
    code, printed = run_python(block.script, folder_of(block.page))
    assert code == 0, printed
    assert printed.strip()
