"""docs/guides/methods.md has each registered method: when to take it, its settings, its example."""

from __future__ import annotations

import inspect
import re

import pytest

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS
from tests.docs.blocks import blocks_of, prose_of

PAGE = "docs/guides/methods.md"
TEXT = prose_of(PAGE)
PARTS = ("Take it when", "Graph:", "Settings:", "Cost:")
TABLE = TEXT.split("| `algorithm` |")[1].split("\n\n")[0].splitlines()[2:]


def rows():
    """Names in the first cell, and the last cell, of each row of the table of all methods."""
    for line in TABLE:
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        yield re.findall(r"`(\w+)`", cells[0]), cells[-1]


def section_of(method):
    """The text below the one heading that has the method's name."""
    sections = re.split(r"^### (.*)$", TEXT, flags=re.MULTILINE)[1:]
    pairs = zip(sections[::2], sections[1::2], strict=True)
    (found,) = [text for heading, text in pairs if f"`{method}`" in heading.split(", ")]
    return re.split(r"^## ", found, flags=re.MULTILINE)[0]


def parts_of(method):
    """The sentences of a method's paragraph, by the bold words with which they begin."""
    words = " ".join(section_of(method).split("\n\n")[1].split())
    pieces = re.split(r"\*\*([^*]+)\*\*", words)[1:]
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def default_of(method, option):
    """The default of an argument: the method's own, or that of the wrapper."""
    declared = ALGORITHMS.get(method)
    own = inspect.signature(declared.__init__).parameters
    if option in own:
        return own[option].default
    by_class = {
        "compression": declared.default_compression,
        "scale_steps": declared.scales_steps,
    }
    if option in by_class:
        return by_class[option]
    return inspect.signature(bf.DistributedOptimizer.__init__).parameters[option].default


def test_the_table_says_of_each_method_when_to_take_it():
    """Each method is in one row, and no two rows say the same."""
    named = [name for names, _ in rows() for name in names]
    assert sorted(named) == sorted(ALGORITHMS)
    when = [cell for _, cell in rows()]
    assert len(set(when)) == len(when)
    assert [cell for cell in when if len(cell) < 15 or "the same" in cell] == []


@pytest.mark.parametrize("method", sorted(ALGORITHMS))
def test_each_method_has_a_paragraph_and_an_example(method):
    """Below its heading: when to take it, graph, settings, cost, and lines that run."""
    assert tuple(parts_of(method)) == PARTS
    section = section_of(method)
    examples = [block for block in blocks_of(PAGE) if block.text in section]
    called = [block for block in examples if f'algorithm="{method}"' in block.text]
    assert [block.marks for block in called] == [{"in=train.py"}]


@pytest.mark.parametrize("method", sorted(ALGORITHMS))
def test_settings_and_costs_are_those_of_the_class(method):
    """Defaults are those of the signatures, tensors sent and kept what the class declares."""
    parts = parts_of(method)
    for option, shown in re.findall(r"`(\w+)=([^`]+)`", parts["Settings:"]):
        if (method, option) != ("local_sgd", "warmup_steps"):  # its twin's
            assert repr(default_of(method, option)) == shown.replace('"', "'"), option
    declared = ALGORITHMS.get(method)
    sent, kept = re.match(r" (\d) messages?\b.*?; (.*)", parts["Cost:"]).groups()
    assert int(sent) == declared.messages
    for_each = re.search(r"(\d)(?: model)? for each neighbour", kept)
    assert int(for_each[1] if for_each else 0) == declared.state_copies_per_neighbor
    total = int(re.match(r"\d", kept)[0])
    assert declared.state_copies == (0 if kept.startswith("1 model for each") else total)
