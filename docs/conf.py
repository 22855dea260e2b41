"""How Sphinx builds the site from these pages and the docstrings; ``scripts/docs`` runs it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS / "_extensions"), str(DOCS.parent)]

import asyncddp  # noqa: E402 - found by the line above

project = "asyncddp"
author = "The asyncddp developers"
project_copyright = author
version = release = asyncddp.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
    "cost_pictures",
    "mathml",
    "notebook_pictures",
    "partition_pictures",
    "public_names",
    "shared_navigation",
    "tasks_first",
    "topology_pictures",
]
exclude_patterns = ["_extensions"]
nitpicky = True
nitpick_ignore_regex = [
    # What is documented elsewhere: no inventory is fetched, so that a build needs no network.
    (
        r"py:.*",
        r"(torch|numpy|np|npt|networkx|nx|sp|matplotlib|mpi4py|collections|contextlib|datetime|os|pathlib|typing(_extensions)?)\b.*",
    ),
    # Type variables and aliases of signatures, which have no page.
    (r"py:class", r"[a-z_]+"),  # of "rank, size: …" in a list of attributes
    (
        r"py:class",
        r"(asyncddp\..*\.)?(M|R|P|_Models|Array|Axes|Compression|DiGraph|Figure|TensorOrTensors)",
    ),
    (r"py:class", r"(asyncddp\..*\.)?(Weights|TensorOrTensors|TopologyLike|RanksOnThreads)"),
    (r"py:class", r"DeviceMesh|HasState|Parameters|Path"),  # by names that only checkers import
    # Names of Bagua's whose short forms are the library's are on a page, but in no index.
    (r"py:.*", r"asyncddp\.integrations\.bagua\..*"),
    (
        r"py:class",
        r"(LRSchedulerFn|ReplicaAgreement|OptimFn|OptimizerFactory|SchedulerFactory|SwitchSchedule|NamedFlatBucket|Window|EdgeWriter|Topology|.*\.(HasState|OptimizerType|Sink|MonitorTarget|Transport|ProgressLoop|Work|WindowProtocol|PendingPublish|PendingGet|MachineLayout|NamedFlatBucket|Tracer|ReplicaAgreement))",
    ),
]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "asyncddp"
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"
html_search_scorer = str(DOCS / "_extensions" / "search_scorer.js")
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True


def plain_words(app: Any, context: Any, lines: list[str]) -> None:
    """Help texts of commands are no reST: a word that ends in an underscore is no link."""
    lines[:] = [re.sub(r"(?<=\w)_(?!\w)", r"\\_", line) for line in lines]


def setup(app: Any) -> None:
    """Listen where sphinx-click has read a command's help."""
    app.connect("sphinx-click-process-description", plain_words)
