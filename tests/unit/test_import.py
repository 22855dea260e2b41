"""Importing the library costs nothing: no MPI, no torch, and every public name is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import asyncddp
from asyncddp import topology
from tests.support import RUN_LIMIT


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=RUN_LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.launches
def test_importing_loads_neither_mpi_nor_torch():
    """``init()`` starts MPI, importing never does."""
    code = "import asyncddp, sys; print(*sorted({'mpi4py.MPI', 'torch'} & set(sys.modules)))"
    assert run(code) == ""


@pytest.mark.launches
def test_using_names_starts_no_mpi():
    """Neither do the public names, nor a world of threads."""
    code = (
        "import asyncddp as bf, sys\n"
        "for name in bf.__all__: getattr(bf, name)\n"
        "with bf.local_world(2) as world: world.run(bf.barrier)\n"
        "print('mpi4py.MPI' in sys.modules)"
    )
    assert run(code) == "False"


@pytest.mark.launches
def test_first_average_loads_no_networkx_and_collects_no_garbage_of_torch():
    """Many ranks start at once: a graph library, and a full pass of the collector, cost each."""
    code = (
        "import gc, sys, torch, mpi4py.MPI\n"
        "before = gc.get_stats()[2]['collections']\n"
        "import asyncddp as bf\n"
        "bf.init()\n"
        "bf.neighbor_allreduce(torch.ones(3))\n"
        "bf.shutdown()\n"
        "print('networkx' in sys.modules, gc.get_stats()[2]['collections'] - before)"
    )
    assert run(code) == "False 0"


@pytest.mark.launches
@pytest.mark.parametrize("switch", ["enable", "disable"])
def test_loading_a_name_leaves_the_garbage_collector_as_it_was(switch):
    """Also where the name cannot be loaded."""
    code = (
        "import asyncddp as bf, gc, sys\n"
        f"gc.{switch}()\n"
        "state = [gc.isenabled()]\n"
        "bf.allreduce; state.append(gc.isenabled())\n"
        "sys.modules['asyncddp.checkpoint'] = None\n"
        "try: bf.save_checkpoint\n"
        "except ImportError: state.append(gc.isenabled())\n"
        "print(set(state), len(state))"
    )
    assert run(code) == f"{{{switch == 'enable'}}} 3"


@pytest.mark.parametrize("name", asyncddp.__all__)
def test_every_public_name_is_there_and_documented(name):
    """Every name in ``__all__`` can be had from the package and has a docstring."""
    assert getattr(asyncddp, name).__doc__


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        (asyncddp, "neighbour_allreduce", " Did you mean 'neighbor_allreduce'?"),
        (asyncddp, "allreduces", " Did you mean 'allreduce'?"),
        (asyncddp, "_allreduces", ""),
        (asyncddp, "quux", ""),
        (topology, "exponential_tow", " Did you mean 'exponential_two'?"),
        (topology, "ExponentialTwoGraph", " Did you mean 'exponential_two'?"),
        (topology, "RingGraph", " Did you mean 'ring'?"),
        (topology, "__nothing__", ""),
    ],
)
def test_a_name_that_does_not_exist_is_answered_with_the_nearest(module, name, hint):
    """An unknown attribute raises AttributeError that suggests a public name if one is near."""
    words = f"module '{module.__name__}' has no attribute '{name}'.{hint}"
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert str(caught.value) == words
    assert not hasattr(module, name)
