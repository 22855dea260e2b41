"""Pages of source code share one navigation tree for each depth of folder.

Every page has the whole tree, in which no source page is marked, and its links depend on the depth
alone; to make it anew for hundreds of source pages took a quarter of the build.
"""

from __future__ import annotations

import functools
from typing import Any

_SOURCES = "_modules/"


def _share_tree(app: Any, page: str, template: str, context: Any, doctree: Any) -> None:
    """Give a source page the tree that was made for the first page of its depth."""
    if page.startswith(_SOURCES) and "toctree" in context:
        trees = app.env.temp_data.setdefault("navigation trees", {})
        make, depth = context["toctree"], page.count("/")
        context["toctree"] = functools.partial(_tree, trees, depth, make)


def _tree(trees: dict[Any, str], depth: int, make: Any, **options: Any) -> str:
    key = (depth, *sorted(options.items()))
    if key not in trees:
        trees[key] = make(**options)
    return trees[key]


def setup(app: Any) -> dict[str, bool]:
    """Listen where Sphinx is about to write a page, before the theme does."""
    app.connect("html-page-context", _share_tree, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
