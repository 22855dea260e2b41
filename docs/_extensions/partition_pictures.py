"""``{partition-pictures} 0.1 1``: labels of parts for each alpha, drawn at build."""

from __future__ import annotations

import base64
import io
from typing import Any

import matplotlib as mpl
import numpy as np
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from asyncddp.data import partition


class PartitionPictures(SphinxDirective):
    """Draw a Dirichlet partition of ten labels among eight parts, for each alpha."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Give each picture as one image that lies in the page itself."""
        labels = np.repeat(np.arange(10), 100)
        return [self._picture(labels, float(alpha)) for alpha in self.arguments[0].split()]

    def _picture(self, labels: Any, alpha: float) -> nodes.Node:
        parts = partition.dirichlet(labels, 8, alpha, equal_sizes=True, seed=0)
        figure = partition.draw(labels, parts)
        figure.axes[0].set_title(rf"$\alpha$ = {alpha:g}", loc="left", size=10)
        file = io.StringIO()
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"{alpha}"}):
            figure.savefig(file, format="svg", metadata={"Date": None})
        data = base64.b64encode(file.getvalue().encode()).decode()
        image = (
            f'<img style="width: 24em" alt="labels of eight parts, Dirichlet({alpha:g})" '
            f'src="data:image/svg+xml;base64,{data}">'
        )
        return nodes.raw("", image, format="html")


def setup(app: Any) -> dict[str, bool]:
    """Register the directive with Sphinx."""
    app.add_directive("partition-pictures", PartitionPictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
