"""The site builds without a warning, needs nothing from the network, and misses no public name."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.blocks import REPO
from tests.docs.conftest import environment


@pytest.fixture(scope="module")
def site():
    """The site, built as people build it."""
    done = subprocess.run(
        [REPO / "scripts" / "docs", "--no-doctests"],
        env=environment(),
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
        "# Nothing\n\n$\\nonsense x$ and $x_1_2$ and [there](nowhere.md)\n", encoding="utf-8"
    )
    code = (REPO / "docs" / "conf.py").read_text(encoding="utf-8")
    code = code.replace("Path(__file__)", f"Path({str(REPO / 'docs' / 'conf.py')!r})")
    (tmp_path / "conf.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", tmp_path, tmp_path / "site"],
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
    ):
        assert words in done.stderr
