"""Executes notebooks and saves them so that two runs differ in what matters only."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from nbformat import NotebookNode

COLOURS = 96  # of a saved picture; curves and letters need no more
SECONDS = 600  # that a cell may take
_RANK = re.compile(r"(\[stdout:\d+\]) (.*)", re.DOTALL)


def digest(notebook: NotebookNode) -> str:
    """A short name of the code in a notebook, by which saved outputs are known to be its own."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def execute(path: Path, **variables: str) -> NotebookNode:
    """Run all cells in a fresh kernel.

    Args:
        path: The notebook.
        **variables: Variables of the kernel's environment.

    Returns:
        The notebook with what it showed.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=SECONDS, record_timing=False, resources=place)
    client.execute(env={**os.environ, **variables})
    return notebook


def tidy(notebook: NotebookNode) -> None:
    """Keep what a reader wants to see: ranks in order, small pictures, no identifiers."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            shown = [one for one in cell.outputs if one.get("name") != "stderr"]
            cell.outputs = [_plain(one) for one in _in_order(shown)]
    notebook.metadata = {
        "asyncddp": {"code": digest(notebook)},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def _in_order(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """What ranks printed one after the other as one text, by rank; all else where it was."""
    from nbformat.v4 import new_output

    ordered: list[NotebookNode] = []
    for printed, some in groupby(outputs, lambda output: _of_rank(output) is not None):
        if not printed:
            ordered += some
            continue
        texts = sorted(text for output in some if (text := _of_rank(output)))
        ordered.append(new_output("stream", name="stdout", text="".join(texts)))
    return ordered


def _of_rank(output: NotebookNode) -> str | None:
    """What one rank printed while the others ran; None for everything else."""
    found = _RANK.match(output.get("data", {}).get("text/plain", ""))
    return f"{found[1]} \n{found[2]}" if found else None


def _plain(output: NotebookNode) -> NotebookNode:
    if "metadata" in output:
        output.metadata = {}
    data = output.get("data", {})
    if "image/png" in data:
        data["image/png"] = _small(data["image/png"])
        data["text/plain"] = "<a picture>"
    return output


def _small(png: str) -> str:
    """A picture with few colours."""
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
        whole = picture.convert("RGBA")
        paper = Image.new("RGBA", whole.size, "white")
        paper.alpha_composite(whole)
        packed = io.BytesIO()
        few = paper.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        few.save(packed, "png", optimize=True)
    return base64.b64encode(packed.getvalue()).decode()


@click.command(add_help_option=False)
@click.option("--smoke", is_flag=True)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
def main(paths: tuple[Path, ...], smoke: bool) -> None:
    """Execute notebooks one after the other, and save them unless it is for a look only."""
    import nbformat

    with tempfile.TemporaryDirectory() as profiles:  # clusters of the user's own stay out of it
        for path in paths:
            start = time.monotonic()
            notebook = execute(path, IPYTHONDIR=profiles, SMOKE="1" if smoke else "")
            if not smoke:
                tidy(notebook)
                nbformat.write(notebook, path)
            done = "runs" if smoke else "saved"
            click.echo(f"{path.name}: {done}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
