"""The notebooks run, show what they promise, and hold what they show."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import socket

import numpy as np
import pytest

from tests.notebook.conftest import Marked
from tests.support.packages import need
from tests.support.processes import REPO, run_to_end, warm_python

need("nbformat", "nbclient", "sklearn")

FOLDER = REPO / "examples" / "notebooks"
NAMES = ("1_average_consensus", "2_designing_a_topology", "3_least_squares", "4_digits")
NAMES += ("6_choosing_a_method",)
NAMES += ("5_lightning",) if importlib.util.find_spec("lightning") else ()
PICTURES = dict(zip(NAMES, (2, 6, 2, 4, 3, 2), strict=False))
NIGHTLY = pytest.mark.nightly
LARGEST = 60_000  # bytes of a picture


# What a test wants to know of a notebook that has run, asked in a last cell of its own; else None.
QUESTIONS = {
    NAMES[0]: """
        every = {n: families(n) for n in measured}
        exact, rate = topology.finite_time_length, topology.consensus_rate
        answer = {
            "measured": {n: {k: list(v) for k, v in measured[n].items()} for n in measured},
            "expected": {n: {k: list(v) for k, v in expected[n].items()} for n in expected},
            "exact": {n: {k: exact(g) for k, g in every[n].items()} for n in every},
            "rate": {n: {k: rate(g) for k, g in every[n].items()} for n in every},
        }""",
}  # fmt: skip


def the_script():
    """scripts/lib/notebooks.py, by which they were saved."""
    path = REPO / "scripts" / "lib" / "notebooks.py"
    spec = importlib.util.spec_from_file_location("notebooks_of_the_scripts", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def saved(name):
    import nbformat

    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def pictures(notebook):
    """The pictures in a notebook, as files."""
    found = [one.get("data", {}).get("image/png") for one in outputs(notebook)]
    return [base64.b64decode(png) for png in found if png]


def text(notebook):
    """All that a notebook shows, but for pictures."""
    shown = []
    for output in outputs(notebook):
        data = {key: value for key, value in output.get("data", {}).items() if "image" not in key}
        shown.append(json.dumps([output.get("text", ""), data], ensure_ascii=False))
    return "\n".join(shown)


class Ran:
    """A notebook that has run at small size in a fresh kernel.

    Attributes:
        notebook: It, with what it showed.
        answer: What its question of ``QUESTIONS`` gave.
    """

    def __init__(self, name, path, environment):
        import nbformat

        lines = QUESTIONS.get(name, "answer = None").strip("\n").splitlines()
        margin = len(lines[0]) - len(lines[0].lstrip())
        question = "\n".join(["import json", *(line[margin:] for line in lines)])
        notebook = saved(name)
        notebook.cells.append(nbformat.v4.new_code_cell(f"{question}\nprint(json.dumps(answer))"))
        nbformat.write(notebook, path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.executable", warm_python())  # of the kernel
            self.notebook = the_script().execute(path, **environment)
        self.answer = json.loads(self.notebook.cells.pop().outputs[0].text)


@pytest.fixture(scope="module")
def profiles(mpi, tmp_path_factory):
    """Four engines that ``ibfrun start`` has left running; ``ibfrun stop`` leaves no process."""
    folder = tmp_path_factory.mktemp("profiles")
    mark = Marked()
    environment = {"IPYTHONDIR": str(folder), "SMOKE": "1", **mark.environment}
    started = ibfrun("start", "-np", "4", **environment)
    try:
        assert started.code == 0, started
        yield environment
        stopped = ibfrun("stop", **environment)
        assert stopped.code == 0, stopped
        assert mark.left() == []
    finally:
        mark.end()


def ibfrun(*words, **environment):
    script = "from asyncddp.cli.notebook_command import ibfrun; ibfrun()"
    return run_to_end([warm_python(frameworks=True), "-c", script, *words], environ=environment)


@pytest.fixture(scope="module")
def ran(profiles, tmp_path_factory):
    """Runs a notebook on those engines, once."""
    folder = tmp_path_factory.mktemp("notebooks")
    done = {}

    def run(name):
        if name not in done:
            done[name] = Ran(name, folder / f"{name}.ipynb", profiles)
        return done[name]

    return run


def check_consensus(answer):
    """Dots are on the lines, below the bound, and at the average when theory says so."""
    for n, families in answer["measured"].items():
        assert set(families) == {"ring", "grid", "exp-2", "one-peer exp-2", "base-2"}
        for name, errors in families.items():
            measured, expected = np.array(errors), np.array(answer["expected"][n][name])
            np.testing.assert_allclose(measured, expected, rtol=1e-9, atol=1e-14)
            exact = answer["exact"][n][name]
            if exact is None:
                bound = answer["rate"][n][name] ** np.arange(len(measured))
                whole = np.arange(len(measured)) % 4 == 0  # of a period of the schedules
                assert (measured <= 1.000001 * bound)[whole].all(), (n, name)
            else:
                assert measured[exact] < 1e-14 < 1e-3 < measured[exact - 1], (n, name)
    exact = {n: {k for k, v in found.items() if v} for n, found in answer["exact"].items()}
    assert exact == {
        "4": {"one-peer exp-2", "base-2"}, "12": {"base-2"}, "16": {"one-peer exp-2", "base-2"},
    }  # fmt: skip


@pytest.mark.mpi(4)
class TestOnFourEngines:
    @pytest.mark.parametrize(
        "name", [NAMES[0], *(pytest.param(name, marks=NIGHTLY) for name in NAMES[1:])]
    )
    def test_runs_and_shows_its_pictures(self, ran, name):
        """Every picture that is saved in a notebook is drawn again by its code."""
        notebook = ran(name).notebook
        found = pictures(notebook)
        assert len(found) == PICTURES[name]
        assert all(one.startswith(b"\x89PNG\r\n\x1a\n") for one in found)
        assert not [one for one in outputs(notebook) if one.get("name") == "stderr"], text(notebook)

    def test_all_ranks_say_hello(self, ran):
        """Each with its neighbours in the ring, on engines and not on threads."""
        shown = text(ran(NAMES[0]).notebook)
        for rank, heard in enumerate(("[1, 3]", "[0, 2]", "[1, 3]", "[0, 2]")):
            assert f"rank {rank} of 4, in a ring: it hears ranks {heard}" in shown
        assert "on threads" not in shown

    def test_measured_consensus_is_what_theory_says(self, ran):
        """Error against steps: ‖WᵏX‖, at most σ₂ᵏ, and zero after the finite-time length."""
        check_consensus(ran(NAMES[0]).answer)

    def test_consensus_on_sixteen_ranks_has_its_known_values(self, ran):
        """e₁² … e₁₀² of 16 ranks that start with 1000 standard normal numbers of seed 0."""
        known = {
            "ring": [2.96e-1, 1.89e-1, 1.17e-1, 8.41e-2, 6.41e-2, 5.04e-2],
            "grid": [2.23e-1, 1.12e-1, 4.89e-2, 2.57e-2, 1.42e-2, 7.97e-3],
            "exp-2": [1.47e-1, 3.40e-2, 2.55e-3, 2.34e-4, 2.45e-5, 2.78e-6],
        }
        for name, squares in known.items():
            found = np.array(ran(NAMES[0]).answer["measured"]["16"][name])[[1, 2, 4, 6, 8, 10]] ** 2
            np.testing.assert_allclose(found, squares, rtol=4e-3)


def test_without_ipyparallel_the_same_cells_run_on_threads(tmp_path):
    """Where no cluster can be had, the notebook says why and measures the same."""
    (tmp_path / "ipyparallel.py").write_text("raise ImportError('not installed')\n")
    found = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": found, "IPYTHONDIR": str(tmp_path / "profiles"), "SMOKE": "1"}
    ran = Ran(NAMES[0], tmp_path / "notebook.ipynb", environment)
    shown = text(ran.notebook)
    assert "on threads, for " in shown
    assert "pip install 'ipykernel>=6.25' 'ipyparallel>=8.8'" in shown
    assert "rank 3 of 4, in a ring: it hears ranks [0, 2]" in shown
    check_consensus(ran.answer)


@pytest.mark.parametrize("name", NAMES)
class TestSaved:
    def test_outputs_are_those_of_the_code(self, name):
        """All cells were run, once, in order, as they are now."""
        notebook = saved(name)
        cells = code_cells(notebook)
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        stale = f"scripts/notebooks {name} saves the outputs of what the cells say now"
        assert notebook.metadata["asyncddp"] == {"code": the_script().digest(notebook)}, stale

    def test_pictures_are_there_and_small(self, name):
        """A saved notebook has all its pictures, each of at most 60 kB."""
        found = pictures(saved(name))
        assert len(found) == PICTURES[name]
        assert max(map(len, found)) <= LARGEST

    def test_nothing_tells_of_the_machine_or_the_moment(self, name):
        """No paths, host names or errors; metadata that do not change from run to run."""
        notebook = saved(name)
        shown = text(notebook)
        for word in ("/tmp", "/home", "/root", str(REPO), socket.gethostname() + " ", "Traceback"):
            assert word not in shown
        assert set(notebook.metadata) == {"asyncddp", "kernelspec", "language_info"}
        assert not any(cell.metadata for cell in notebook.cells)
        assert not any(output.get("metadata") for output in outputs(notebook))

    def test_teaches_in_words_and_formulas(self, name):
        """As many cells of text as of code, or nearly; with a title, and formulas."""
        cells = saved(name).cells
        words = [cell.source for cell in cells if cell.cell_type == "markdown"]
        assert cells[0].source.startswith(f"# {name[0]} · ")
        assert 2 * len(words) > len(cells) - 4
        assert any("$" in source for source in words)
