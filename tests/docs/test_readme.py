"""What README.md says besides its scripts is true: its names and files exist."""

from __future__ import annotations

import os
import re

from PIL import Image

from tests.docs.blocks import REPO, blocks_of

TEXT = (REPO / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (REPO / "docs" / "benchmarks-developers.md").read_text(encoding="utf-8")
BLOCKS = blocks_of("README.md")
ASYNCHRONOUS = "win_put"
FIRST_COLUMN = re.findall(r"^\| `(\w+)(\(.*?\))?` \|", TEXT, flags=re.MULTILINE)


def test_there_are_blocks_and_tables():
    """The tests below are not empty by accident."""
    assert {block.language for block in BLOCKS} == {"python", "bash"}
    assert len(FIRST_COLUMN) >= 8


def test_graphs_in_the_table_exist():
    """Every graph or schedule of the table is a function of ``topology``."""
    from asyncddp import topology

    named = [name for name, call in FIRST_COLUMN if call]
    assert named
    assert not [name for name in named if not hasattr(topology, name)]


def test_methods_in_the_table_exist():
    """The table has every registered algorithm, and no other."""
    from asyncddp.algorithms import ALGORITHMS

    table = TEXT.split("| `algorithm` |")[1].split("\n\n")[0]
    cells = re.findall(r"^\|([^|]*)\|", table, flags=re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(ALGORITHMS)


def test_links_and_commands_lead_somewhere():
    """Linked files, their headings, and scripts are there."""
    links = re.findall(r"\]\(([^):]+)\)", TEXT)
    commands = re.findall(r"^(\./\S+)|`(\./\S+)", TEXT, flags=re.MULTILINE)
    assert links
    assert commands
    for link in links:
        path, _, anchor = link.partition("#")
        page = REPO / (path or "README.md")
        assert page.exists(), link
        assert not anchor or anchor in headings(page), link
    for command in {(first or second).rstrip("`") for first, second in commands}:
        assert os.access(REPO / command, os.X_OK), command


def headings(page):
    """The anchors of a page: its headings in lower case, with hyphens."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in found}


def figures_of(row):
    """The cells of a row of the table beside DDP: DDP's, and ours."""
    (line,) = [line for line in TEXT.splitlines() if line.startswith(f"> | {row}")]
    return [cell.strip() for cell in line.split("|")[2:4]]


def test_figures_beside_a_slow_rank_are_those_of_the_picture():
    """The picture holds the sentence of its run, which the page quotes."""
    with Image.open(REPO / "docs" / "time-to-accuracy.png") as picture:
        sentence = picture.text["Description"]
    assert sentence in " ".join(TEXT.split())
    ddp, ours = figures_of("seconds to 95 % accuracy")
    assert f"after {ddp} s with DDP (gloo)" in sentence
    assert f"after {ours} s with {ASYNCHRONOUS}:" in sentence
    ddp, ours = figures_of("steps per second")
    assert sentence.endswith(f"at {ours} steps per second instead of {ddp}.")


def test_figures_of_steps_and_bytes_are_those_of_the_benchmarks():
    """A step: the least and the most of three models; models sent: on 2, 4 and 8 hosts."""
    steps = BENCHMARKS.split("\n## ops and step")[1].split("\n## ")[0]
    ddp, ours = (
        [float(ms) for ms in re.findall(rf"^\| {name} \| ([\d.]+) ms ", steps, re.MULTILINE)]
        for name in ("DDP gloo", "adapt_then_combine, one-peer")
    )
    times = [theirs / mine for theirs, mine in zip(ddp, ours, strict=True)]
    assert figures_of("a step")[1] == f"{min(times):.2f} to {max(times):.2f} times as fast"
    sent = [
        [
            re.search(rf"^\| {name}, {hosts} hosts, unlimited \| 16 MB \|.*?\| ([\d.]+) \| *\|",
                      BENCHMARKS, re.MULTILINE)[1]
            for hosts in (2, 4, 8)
        ]
        for name in ("DDP gloo", "one-peer AWC")
    ]  # fmt: skip
    assert figures_of("models sent") == [", ".join(f"{float(n):.2f}" for n in ns) for ns in sent]


def test_extras_in_the_table_are_those_of_the_package():
    """The table of extras names each extra of pyproject.toml, and none besides."""
    section = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    section = section.split("[project.optional-dependencies]")[1].split("\n[project")[0]
    declared = set(re.findall(r"^(\w+) = \[", section, flags=re.MULTILINE))
    table = TEXT.split("| extra |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`.*?`) \|", table, flags=re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == declared


def test_rooms_of_the_map_exist():
    """Packages and folders of the map in CONTRIBUTING.md are there."""
    text = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^([a-z_/]+/) ", text, flags=re.MULTILINE)
    assert len(rooms) > 10
    assert [room for room in rooms if not (REPO / room).is_dir()] == []


def test_contributing_names_every_area_of_tests():
    """CONTRIBUTING.md lists every folder that holds tests, and none that is not there."""
    text = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^    tests/(\w+) ", text, flags=re.MULTILINE))
    tests = REPO / "tests"
    assert {path.relative_to(tests).parts[0] for path in tests.glob("*/**/test_*.py")} <= named
    assert all((tests / name).is_dir() for name in named)
