"""Notebook 1 in JupyterLab, in a browser, as its reader runs it."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import time

import pytest

from tests.notebook.conftest import Marked
from tests.support.processes import REPO, end_session, environment, warm_python

NOTEBOOK = REPO / "examples" / "notebooks" / "1_average_consensus.ipynb"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 240.0  # seconds, for a machine that is busy

pytestmark = pytest.mark.mpi(4)


@pytest.fixture
def browser():
    """Chromium without a window; skips in words where there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("needs Chromium, which is not installed here: apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'"
    )
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def server(mpi, tmp_path):
    """JupyterLab on loopback, with a token, in a folder with notebook 1 that shows nothing yet."""
    pytest.importorskip("jupyterlab", reason="needs jupyterlab: pip install -e '.[dev]'")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    (tmp_path / "work").mkdir()
    nbformat.write(notebook, tmp_path / "work" / NOTEBOOK.name)
    mark, token = Marked(), secrets.token_hex(16)
    folders = {
        f"JUPYTER_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "DATA", "RUNTIME")
    }
    own = {"IPYTHONDIR": str(tmp_path / "profiles"), "JUPYTER_TOKEN": token, "SMOKE": "1"}
    options = [
        "--no-browser",
        "--ip=127.0.0.1",
        "--port=0",
        "--allow-root",
        "--LabApp.news_url=None",
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [warm_python(), "-m", "jupyterlab", *options],
            cwd=tmp_path / "work",
            env=environment({**folders, **own, **mark.environment}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield address(process, tmp_path), token
        process.terminate()
        process.wait(60)
        assert mark.left(30) == []
    finally:
        end_session(process)
        mark.end()


def address(process, folder):
    """Where the server answers, once it does."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        for file in folder.glob("RUNTIME/jpserver-*.json"):
            with contextlib.suppress(json.JSONDecodeError):  # which is being written
                return json.loads(file.read_text())["url"]
        time.sleep(0.1)
    pytest.fail((folder / "log").read_text(errors="replace"))


def await_kernel(page, sessions):
    """Wait until the notebook has a kernel; choose the one that is offered if JupyterLab asks."""
    offer = page.locator(".jp-Dialog .jp-mod-accept")
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if offer.count():
            offer.click()
        if any(
            one["kernel"]["execution_state"] == "idle" for one in page.request.get(sessions).json()
        ):
            return
        page.wait_for_timeout(200)
    pytest.fail("the notebook has no kernel")


@pytest.mark.nightly
def test_run_all_cells_and_see_the_plots_appear(browser, server):
    """A reader opens the notebook, runs all cells, and sees what the engines have measured."""
    url, token = server
    assert url.startswith("http://127.0.0.1:")
    page = browser.new_page(viewport={"width": 1200, "height": 1600})
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(f"{url}lab/tree/{NOTEBOOK.name}?token={token}")
    page.locator(".jp-NotebookPanel .jp-CodeCell").first.wait_for()
    await_kernel(page, f"{url}api/sessions?token={token}")
    pictures = page.locator(".jp-OutputArea-output img[src^='data:image/png']")
    assert pictures.count() == 0

    page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
    page.get_by_text("Run All Cells", exact=True).click()

    end_of_run = page.locator(".jp-OutputArea-output table, [data-mime-type$=error]").first
    end_of_run.wait_for(state="attached")
    table = page.locator(".jp-OutputArea-output table")
    assert table.count(), end_of_run.inner_text()
    assert "✗" not in table.inner_text()
    assert table.locator("tr").count() == 16
    assert pictures.count() == 2
    for picture in pictures.all():
        picture.scroll_into_view_if_needed()
        assert picture.evaluate("image => image.complete && image.naturalWidth") > 400
    shown = page.locator(".jp-NotebookPanel").inner_text()
    assert "rank 3 of 4, in a ring: it hears ranks [0, 2]" in shown
    assert page.locator("[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
