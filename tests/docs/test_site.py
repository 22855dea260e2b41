"""The site builds without a warning, needs nothing from the network, and misses no public name."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from tests.docs.blocks import REPO
from tests.docs.conftest import environment
from tests.support.processes import warm_server

TASKS = {
    "my ranks differ in speed": "guides/stragglers",
    "my network is slow": "guides/slow-networks",
    "I come from BlueFog": "coming-from-bluefog",
    "I come from Bagua": "coming-from-bagua",
    "I come from Horovod": "coming-from-horovod",
    "I come from DDP": "coming-from-ddp",
    "I research topologies": "guides/topologies",
    "save and resume": "guides/saving",
    "offline installation": "guides/installing",
    "several machines": "guides/machines",
    "I have GPUs": "guides/installing-gpus",
    "something hangs": "guides/hangs",
    "clip gradients": "guides/training-loop",
}


@pytest.fixture(scope="module")
def site():
    """The site, built as people build it."""
    done = subprocess.run(
        [REPO / "scripts" / "docs"],
        env={**environment(), "ASYNCDDP_VENV": warm_server().environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the site is in build/docs" in done.stderr
    return REPO / "build" / "docs"


def test_every_page_is_there(site):
    """Each page of docs/ is a page of the site, and begins with its title."""
    pages = [*(REPO / "docs").rglob("*.md"), *(REPO / "docs").rglob("*.rst")]
    assert len(pages) > 20
    for page in pages:
        built = site / page.relative_to(REPO / "docs").with_suffix(".html")
        assert "<h1>" in built.read_text(encoding="utf-8"), page


def test_each_task_card_leads_to_a_page(site):
    """All cards with a title of their own are links, but those two that say when to use what."""
    source = (REPO / "docs" / "index.md").read_text(encoding="utf-8")
    cards = re.findall(r":::\{grid-item-card\} (.+)\n(?::link: (\S+))?", source)
    assert [title for title, page in cards if not page] == [
        "Use it when",
        "Use DistributedDataParallel when",
    ]
    linked = {page for _, page in cards} - {""}
    assert set(TASKS.values()) <= linked
    guides = {f"guides/{page.stem}" for page in (REPO / "docs" / "guides").glob("*.md")}
    assert guides <= linked, "a guide to which no card leads"
    built = (site / "index.html").read_text(encoding="utf-8")
    links = re.findall(r"<a class=\"sd-stretched-link[^\"]*\" href=\"([^\"#]*)", built)
    assert len(links) >= len(linked)
    assert [link for link in links if not (site / link).is_file()] == []


def test_search_finds_pages_by_task(site):
    """What people would say of their task is a main entry of the search index, put first.

    The landing page has a field for it, which the page of results reads.
    """
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    for task, page in TASKS.items():
        found = index["indexentries"].get(task.lower(), [])
        assert [index["docnames"][number] for number, _, main in found if main] == [page], task
    landing = (site / "index.html").read_text(encoding="utf-8")
    assert re.search(r'<form class="task-search" action="search.html".*?name="q"', landing, re.S)
    assert (site / "search.html").is_file()


def test_the_gallery_shows_pictures_with_words(site):
    """Each picture of the landing page is there, and says in words what it shows."""
    landing = (site / "index.html").read_text(encoding="utf-8")
    pictures = re.findall(r"<img\b[^>]*>", landing)
    assert len(pictures) >= 8
    for picture in pictures:
        (source,) = re.findall(r'\bsrc="([^"]*)"', picture)
        assert source.startswith("data:image/") or (site / source).is_file(), source
        assert re.search(r'\balt="[^"]{10,}"', picture), picture[:200]


def test_reading_needs_no_network(site):
    """Scripts, styles, fonts and pictures lie in the site itself."""
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]*)|<link\b[^>]*\bhref=\"([^\"]*)",
            page.read_text(encoding="utf-8"),
        )
        away = [one for pair in loaded for one in pair if one.startswith(("http", "//"))]
        assert away == [], page
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.findall(r"@import[^;]*http|url\(['\"]?(?:https?:)?//", text), style


def test_pictures_and_formulas_are_drawn(site):
    """Concepts show what ``topology.draw`` makes; the reference has formulas as MathML."""
    concepts = (site / "concepts.html").read_text(encoding="utf-8")
    assert concepts.count("data:image/svg+xml;base64,") >= 4
    verbs = (site / "api" / "verbs.html").read_text(encoding="utf-8")
    assert '<math xmlns="http://www.w3.org/1998/Math/MathML"' in verbs
    assert "\\sum" not in verbs


def test_what_is_missing_is_named(tmp_path):
    """A public name on no page, a formula that cannot be drawn, a dead link: each is a warning."""
    (tmp_path / "index.md").write_text(
        "# Nothing\n\n$\\nonsense x$ and $x_1_2$ and [there](nowhere.md)\n\n"
        "```{notebook-picture} 4_digits 99\n:alt: nothing\n```\n",
        encoding="utf-8",
    )
    code = (REPO / "docs" / "conf.py").read_text(encoding="utf-8")
    code = code.replace("Path(__file__)", f"Path({str(REPO / 'docs' / 'conf.py')!r})")
    (tmp_path / "conf.py").write_text(code, encoding="utf-8")
    folders = (tmp_path, tmp_path / "site")
    done = subprocess.run(
        warm_server().command("-m", "sphinx", "-qW", "--keep-going", *map(str, folders)),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    for words in (
        "asyncddp.allreduce is public, but on no page of docs/api",
        "topology.ring is public, but on no page of docs/api",
        "formula with \\nonsense, which MathML lacks",
        "formula x_1_2: DoubleSubscriptsError",
        "nowhere.md",
        "4_digits.ipynb has 4 pictures, and no number 99",
    ):
        assert words in done.stderr
