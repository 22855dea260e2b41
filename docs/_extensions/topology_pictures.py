"""``{picture} ring(8)``: what ``topology.draw`` makes of a graph or schedule, drawn at build."""

from __future__ import annotations

import base64
import io
from typing import Any

import matplotlib as mpl
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from asyncddp import topology


class Picture(SphinxDirective):
    """Call a function of ``topology``, and show the graph or schedule that it gives."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec = {"rounds": directives.positive_int}  # noqa: RUF012 - as docutils has it

    def run(self) -> list[nodes.Node]:
        """Give the picture as one image that lies in the page itself."""
        call = self.arguments[0]
        names = {name: getattr(topology, name) for name in topology.__all__}  # loaded on first use
        made = eval(call, {"__builtins__": {}}, names)  # written by us, on our own page
        figure = topology.draw(made, rounds=self.options.get("rounds"))
        file = io.StringIO()
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": call}):
            figure.savefig(file, format="svg", metadata={"Date": None})
        data = base64.b64encode(file.getvalue().encode()).decode()
        width = 26 if len(figure.axes) == 1 else 13 * min(4, len(figure.axes))
        image = (
            f'<img class="topology-picture" style="width: {width}em" '
            f'alt="topology.{call}" src="data:image/svg+xml;base64,{data}">'
        )
        return [nodes.raw("", image, format="html")]


def setup(app: Any) -> dict[str, bool]:
    """Register the directive with Sphinx."""
    app.add_directive("picture", Picture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
