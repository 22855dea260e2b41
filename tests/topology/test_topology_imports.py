"""networkx and numpy are enough; what needs more says how to get it."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import sys

class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "mpi4py", "scipy", "matplotlib"}:
            raise ImportError(f"{name} is walled off")

sys.meta_path.insert(0, Wall())
from asyncddp import topology
"""


def run(code: str) -> str:
    """What the code prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.launches
def test_everything_but_pictures_and_large_spectra_works_without_optional_packages():
    """Figures, errors and costs need networkx and numpy only, also of large graphs."""
    code = """
for graph in (topology.grid_2d(12), topology.exponential_two(12), topology.base_k(12, 1),
              topology.matcha(topology.ring(8), 0.5, 0), topology.equi_dynamic(8, 0)):
    topology.consensus_rate(graph), topology.spectral_gap(graph), topology.min_eigenvalue(graph)
    topology.is_doubly_stochastic(graph), topology.is_symmetric(graph)
    topology.consensus_error(graph, 5), topology.communication_cost(graph, 1e6)
    topology.mixing_matrix(graph)
print(topology.finite_time_length(topology.base_k(600, 1)),
      round(topology.consensus_rate(topology.exponential_two(4096)), 6),
      len(topology.consensus_error(topology.grid_2d(2500), 3)))
"""
    assert run(BLOCK + code) == "16 0.846154 4"


@pytest.mark.launches
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "topology.draw(topology.ring(4))",
            "topology.draw needs matplotlib; install it: pip install 'matplotlib>=3.8'",
        ),
        (
            "topology.mixing_matrix(topology.ring(4), sparse=True)",
            "mixing_matrix(…, sparse=True) needs scipy; install it: pip install 'scipy>=1.10'",
        ),
        (
            "topology.consensus_rate(topology.grid_2d(900))",
            "consensus rate of a graph on 900 ranks (more than 512, and not circulant) needs "
            "scipy's sparse routines; install them: pip install 'scipy>=1.10'",
        ),
        (
            "topology.min_eigenvalue(topology.grid_2d(900))",
            "smallest eigenvalue of a graph on 900 ranks (more than 512, and not circulant) needs "
            "scipy's sparse routines; install them: pip install 'scipy>=1.10'",
        ),
    ],
)
def test_what_is_missing_is_named_with_its_install_line(call, message):
    """A call that needs scipy or matplotlib raises ``ImportError`` with the pip line."""
    code = f"\ntry:\n    {call}\nexcept ImportError as error:\n    print(error)\n"
    assert run(BLOCK + code) == message


@pytest.mark.launches
def test_import_loads_no_heavy_package():
    """``import topology`` loads none of torch, mpi4py, scipy, matplotlib and networkx."""
    heavy = {"torch", "mpi4py", "scipy", "matplotlib", "networkx"}
    loaded = run("import topology, sys; print(*(name.split('.')[0] for name in sys.modules))")
    assert not heavy & set(loaded.split())
