"""Every public name is in the reference, with a docstring: a missing one is a warning."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from sphinx.util import logging

import asyncddp
from asyncddp import topology

logger = logging.getLogger(__name__)


def _check(app: Any, env: Any) -> None:
    documented = {name for name, *_ in env.get_domain("py").get_objects()}
    for module in (asyncddp, topology):
        for name in module.__all__:
            full = f"{module.__name__}.{name}"
            if full not in documented:
                logger.warning("%s is public, but on no page of docs/api", full)
            value = getattr(module, name)
            if isinstance(value, type | FunctionType) and not inspect.getdoc(value):
                logger.warning("%s has no docstring", full)


def setup(app: Any) -> dict[str, bool]:
    """Have Sphinx ask for it when all pages are read."""
    app.connect("env-check-consistency", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
