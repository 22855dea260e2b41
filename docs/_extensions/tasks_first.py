"""The site's index begins with tasks, the entries that ``{index} ! …`` makes, before all names."""

from __future__ import annotations

from typing import Any


def _put_tasks_first(app: Any, page: str, template: str, context: Any, doctree: Any) -> None:
    """Group the main entries under a letter of their own."""
    if page != "genindex":
        return
    letters = context["genindexentries"]
    tasks = [
        (name, (mains, [], None))
        for _, entries in letters
        for name, (links, _, _) in entries
        if (mains := [link for link in links if link[0]])
    ]
    context["genindexentries"] = [("Tasks", sorted(tasks, key=_folded)), *letters]


def _folded(entry: tuple[str, Any]) -> str:
    return entry[0].casefold()


def setup(app: Any) -> dict[str, bool]:
    """Listen where Sphinx is about to write a page."""
    app.connect("html-page-context", _put_tasks_first)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
