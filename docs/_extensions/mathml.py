"""Formulas as MathML, which browsers draw by themselves: no script, nothing from the network."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from docutils import nodes
from latex2mathml import exceptions
from latex2mathml.converter import convert
from sphinx.util import logging

logger = logging.getLogger(__name__)
FAILURES = tuple(value for name, value in vars(exceptions).items() if name.endswith("Error"))

STYLE = "overflow-x: auto; overflow-y: hidden; padding: 0.3em 0"


def _markup(node: nodes.math | nodes.math_block, display: str) -> str:
    """A formula's MathML; a command that the converter does not know is a warning."""
    text = node.astext()
    if "\\\\" in text and "\\begin" not in text.split("\\\\")[0]:
        text = rf"\begin{{align*}}{text}\end{{align*}}"
    try:
        markup: str = convert(text.replace("\n", " "), display=display)
    except FAILURES as error:
        logger.warning("formula %s: %s", text, type(error).__name__, location=node)
        return ""
    unknown = re.findall(r"\\\w+", unescape(markup))
    if unknown:
        logger.warning("formula with %s, which MathML lacks", unknown[0], location=node)
    return markup


def _visit_inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(_markup(node, "inline"))
    raise nodes.SkipNode


def _visit_block(writer: Any, node: nodes.math_block) -> None:
    for formula in re.split(r"\n\s*\n", node.astext().strip()):
        part = nodes.math_block(formula, formula)
        part.source, part.line = node.source, node.line
        writer.body.append(f'<div style="{STYLE}">{_markup(part, "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer with Sphinx."""
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
