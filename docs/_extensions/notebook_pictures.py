"""``{notebook-picture} 4_digits 2``: the second picture that a notebook of examples/ shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"


class NotebookPicture(SphinxDirective):
    """Show a picture out of the outputs that are saved in a notebook."""

    required_arguments = 2
    option_spec = {"alt": directives.unchanged_required}  # noqa: RUF012 - as docutils has it

    def run(self) -> list[nodes.Node]:
        """Give the picture as one image that lies in the page itself."""
        name, number = self.arguments
        path = NOTEBOOKS / f"{name}.ipynb"
        self.env.note_dependency(str(path))
        pictures = pictures_of(path)
        if not 1 <= int(number) <= len(pictures):
            raise self.error(f"{path.name} has {len(pictures)} pictures, and no number {number}")
        picture = nodes.image(
            uri=f"data:image/png;base64,{pictures[int(number) - 1]}", alt=self.options["alt"]
        )
        return [picture]


def pictures_of(path: Path) -> list[str]:
    """The PNG pictures of a notebook in base64, in order."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    return ["".join(data["image/png"]).replace("\n", "") for data in shown if "image/png" in data]


def setup(app: Any) -> dict[str, bool]:
    """Register the directive with Sphinx."""
    app.add_directive("notebook-picture", NotebookPicture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
