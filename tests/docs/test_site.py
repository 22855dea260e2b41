"""The site builds without a warning, needs nothing from the network, and misses no public name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from tests.docs.blocks import REPO, blocks_of, prose_of
from tests.docs.conftest import environment
from tests.support.processes import RUN_LIMIT, warm_server

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
    "a rank dies": "guides/elastic",
    "replace a rank": "guides/elastic",
}


FOUND_FIRST = {
    "my network is slow": "guides/slow-networks",
    "checkpoint": "guides/saving",
    "neighbor_allreduce": "api/verbs",
    "latency": "guides/",
    "samples per second": ("guides/", "examples"),
}
"""What people type, and how the name of the first page begins that is found."""
SEARCH = """
const fs = require("fs"), vm = require("vm");
const [site, ...queries] = process.argv.slice(1);
const document = { getElementById: () => ({}) };
const page = vm.createContext({ document, _ready: () => {}, _: (text) => text,
    SPHINX_HIGHLIGHT_ENABLED: false });
page.window = page;
for (const file of ["searchtools.js", "language_data.js"])
    vm.runInContext(fs.readFileSync(`${site}/_static/${file}`, "utf8"), page);
vm.runInContext("Search.query = () => {}", page);
vm.runInContext(fs.readFileSync(`${site}/searchindex.js`, "utf8"), page);
const pages = (query) => vm.runInContext(
    `Search._performSearch(...Search._parseQuery(${JSON.stringify(query)}))`, page);
console.log(JSON.stringify(queries.map((query) => pages(query).map((one) => one[0]).reverse())));
"""
"""Runs the search of the site's pages by node: the pages that it finds, best first."""


@pytest.fixture(scope="module")
def site():
    """The site, built as people build it."""
    done = subprocess.run(
        [REPO / "scripts" / "docs"],
        env={**environment(), "ASYNCDDP_VENV": warm_server().environment},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT,
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


def test_the_landing_page_begins_with_code():
    """Ten lines, how to install and run them, and a picture stand above the tasks."""
    script, install = blocks_of("docs/index.md")[:2]
    lines = [line for line in script.text.splitlines() if line]
    assert len(lines) <= 10
    assert "bf.DistributedOptimizer(optimizer, model" in script.text
    assert re.search(r"pip install '\.\[\w+\]'\nasyncddp run .*train\.py", install.text)
    above = prose_of("docs/index.md").split("## Find your task")[0]
    assert above.index("```python") < above.index("```bash") < above.index(".png)")


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


def test_the_index_begins_with_tasks(site):
    """Its first group has what people would say of their task, and no names."""
    text = (site / "genindex.html").read_text(encoding="utf-8")
    groups = re.findall(r'<section id="(.*?)" class="genindex-section">(.*?)</section>', text, re.S)
    assert groups[0][0] == "Tasks"
    entries = [name.strip() for name in re.findall(r"<strong>([^<]*)</strong>", groups[0][1])]
    assert set(TASKS) <= set(entries)
    assert "asyncddp.DistributedOptimizer" not in groups[0][1]


def test_tables_for_developers_are_in_no_search(site):
    """What a bench has printed is on the site, and no word of it leads there."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    number = index["docnames"].index("benchmarks-developers")
    for words in (index["terms"], index["titleterms"]):
        leading = [
            w for w, found in words.items() if number in (found if type(found) is list else [found])
        ]
        assert leading == []


def test_guides_are_found_first(site):
    """The search of the site itself puts a task's guide, or the name that was typed, at the top."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node, which runs the site's search without a browser")
    command = [node, "-e", SEARCH, str(site), *FOUND_FIRST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = zip(FOUND_FIRST.items(), json.loads(done.stdout), strict=True)
    assert [
        (query, pages[0]) for (query, first), pages in found if not pages[0].startswith(first)
    ] == []


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


@pytest.mark.parametrize(
    ("n", "local"), [(2, 1), (3, 1), (64, 1), (512, 1), (16, 8), (24, 8), (64, 8), (512, 8)]
)
def test_the_picture_of_costs_shows_what_the_model_predicts(monkeypatch, n, local):
    """Of the rounds that it looks at, the mean is that of all; allreduces are the schedule's."""
    monkeypatch.syspath_prepend(str(REPO / "docs" / "_extensions"))
    from cost_pictures import one_peer

    from asyncddp import topology

    links = topology.Links(
        topology.Link.parse("10Gbit,50us"), local, topology.Link.parse("2.4Tbit,2us")
    )
    expected = topology.communication_cost(topology.one_peer_exponential(n), 1e8, links)
    seconds, cost = one_peer(n, 1e8, links)
    assert seconds == pytest.approx(expected.neighbors.seconds, rel=1e-12)
    assert cost.allreduces == expected.allreduces


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
