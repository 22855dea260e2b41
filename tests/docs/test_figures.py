"""Figures on the pages are those of the record of ``scripts/bench``, and name their processor."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import PAGES, REPO

RECORD = (REPO / "docs" / "benchmarks-developers.md").read_text(encoding="utf-8")
SIZES = {"B": 1, "KB": 2**10, "MB": 2**20}


def page(name):
    """The words of a page, with one space between them."""
    return " ".join((REPO / name).read_text(encoding="utf-8").split())


def table_of(heading):
    """The first table below a heading of the record: rows of cells by column."""
    section = RECORD.split(f"\n### {heading}\n")[1].split("\n### ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(rows[0], row, strict=False)) for row in rows[2:]]


def size_of(text):
    number, unit = text.split()
    return float(number) * SIZES[unit]


def span(heading, column, least, most):
    """The least and the most of a column, from one size to another."""
    rows = [row for row in table_of(heading) if size_of(least) <= size_of(row["tensor"])]
    cells = [row[column] for row in rows if size_of(row["tensor"]) <= size_of(most)]
    return min(map(number, cells)), max(map(number, cells))


def number(cell):
    return float(cell.split()[0])


def faster(*where):
    """How many times as fast, from least to most, where the record has ours over the other's."""
    least, most = span(*where)
    low, high = f"{1 / most:.1f}", f"{1 / least:.1f}"
    return f"{low} times" if low == high else f"{low} to {high} times"


def steps_beside_ddp():
    found = []
    for heading in re.findall(r"^### (a step of .*)$", RECORD.split("\n## torch-d")[0], re.M):
        rows = {row["method"]: number(row["a step"]) for row in table_of(heading)}
        found.append(rows["DDP gloo"] / rows["adapt_then_combine, one-peer"])
    return f"{min(found):.2f} to {max(found):.2f} times as fast"


def beside_ddp(hosts):
    rows = {row["method"]: row for row in table_of(f"a step, {hosts} hosts, 100 Mbit/s")}
    return rows["one-peer AWC"]["÷ DDP's samples/s"]


def models_sent(who):
    words = rf"^\| {who}, 8 hosts, unlimited \| 16 MB \|.*?\| ([\d.]+) \| *\|"
    return f"{float(re.search(words, RECORD, re.MULTILINE)[1]):.2f}"


PEER, SUM = "neighbor_allreduce, one peer per call", "allreduce, average"
OURS, MPI4PY, MPI = "asyncddp", "asyncddp ÷ mpi4py", "asyncddp ÷ MPI"


def claims():
    """Pages, and what they say by the record."""
    small = span(PEER, OURS, "4 B", "256 KB")
    yield "README.md", steps_beside_ddp()
    yield "docs/coming-from-ddp.md", f"a step is {steps_beside_ddp()}"
    yield "docs/coming-from-ddp.md", f"sends {models_sent('one-peer AWC')} models per step"
    yield "docs/coming-from-ddp.md", f"DDP sends {models_sent('DDP gloo')} on 8 hosts"
    yield "docs/coming-from-ddp.md", f"{beside_ddp(2)} times as fast as DDP on 2 hosts"
    yield "docs/coming-from-ddp.md", f"{beside_ddp(8)} times on 8"
    yield "docs/coming-from-bluefog.md", f"takes {small[0]:.0f} to {small[1]:.0f} µs"
    for heading, column, name, rival in (
        (PEER, MPI4PY, "neighbor_allreduce", "mpi4py's exchange"),
        (SUM, MPI, "allreduce", "MPI's"),
    ):
        edges = {"neighbor_allreduce": ("64 KB", "256 KB"), "allreduce": ("4 KB", "16 KB")}[name]
        less = faster(heading, column, "4 B", edges[0])
        yield "docs/benchmarks.md", f"| `{name}`, up to {edges[0]} | {rival} | {less}"
    yield "docs/benchmarks.md", f"| {faster(PEER, MPI4PY, '256 KB', '4 MB')} on an AMD EPYC"
    yield "docs/benchmarks.md", f"| {faster(PEER, MPI4PY, '16 MB', '256 MB')} on an AMD EPYC"
    yield "docs/benchmarks.md", f"| {faster(SUM, MPI, '16 KB', '256 MB')} on an AMD EPYC"
    barrier = table_of("barrier")[0][MPI]
    yield "docs/benchmarks.md", f"| `barrier` | MPI's | {number(barrier):.1f} times its time"
    broadcast = table_of("broadcast, roots in turn")[0][MPI]
    yield "docs/benchmarks.md", f"| `broadcast` of 4 B | MPI's | {number(broadcast):.1f} times"
    least, most = span(PEER, MPI4PY, "256 KB", "4 MB")
    yield "docs/benchmarks.md", f"| mpi4py's exchange | {least:.2f} to {most:.2f} times its time"
    (row,) = [row for row in table_of(PEER) if row["tensor"] == "64 MB"]
    beside = number(row[OURS]) / number(row["limit: local lerp"])
    yield "docs/benchmarks.md", f"| a `lerp` alone | {beside:.2f} times its time"
    (row,) = [row for row in table_of(SUM) if row["tensor"] == "4 MB"]
    yield "docs/benchmarks.md", f"| `allreduce`, 4 MB | MPI's | {row[MPI]} times its time"


@pytest.mark.parametrize(("where", "words"), list(claims()))
def test_a_page_says_what_the_record_says(where, words):
    """The record is what a run has printed beside its JSON; the pages have no other figures."""
    assert words in page(where), words


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md", "docs/coming-from-ddp.md"])
def test_figures_name_their_processor(name):
    """Whoever reads a figure beside another library's learns on what it was measured."""
    processor = re.search(r"^ +processor +(.*)$", RECORD, re.MULTILINE)[1]
    assert f"two cores of an {processor}" in page(name)


@pytest.mark.parametrize("name", ["README.md", *(one for one in PAGES if "docs/" in one)])
def test_nothing_is_counted_that_grows(name):
    """No page says how many notebooks or extensions there are, or what has come is to come."""
    numbers = "two|three|four|five|six|seven|eight|nine|ten"
    counted = rf"(?i)\b({numbers})( small)? (notebooks|extensions|parts that no library)"
    assert not re.search(counted, page(name))
    assert "To come:" not in page(name)
