"""`import topology` gives asyncddp.topology, and a user's own `topology.py` is in nobody's way."""

from __future__ import annotations

import sys

import pytest

from tests.support.processes import run_to_end

pytestmark = pytest.mark.launches

SAME = """
import pickle, sys
{first}
import topology.schedules.base_k as by_short_name
from asyncddp.topology.schedules import base_k as by_full_name
from topology import Schedule, TopologyError
import asyncddp as bf
import topology
assert topology is bf.topology and by_short_name is by_full_name
assert by_full_name.__spec__.name == "asyncddp.topology.schedules.base_k"
assert Schedule is bf.topology.Schedule and TopologyError is bf.topology.TopologyError
assert isinstance(pickle.loads(pickle.dumps(topology.base_k(6, 1))), Schedule)
assert pickle.loads(b"ctopology.schedule\\nSchedule\\n.") is Schedule, "as older files name it"
assert not {{"torch", "mpi4py"}} & set(sys.modules)
"""


@pytest.mark.parametrize(
    "first", ["import topology", "import asyncddp.topology", "import asyncddp"]
)
def test_both_names_are_of_the_same_modules(first):
    """Each class is there once, in whatever order the names are imported, also for pickle."""
    done = run_to_end([sys.executable, "-W", "error", "-c", SAME.format(first=first)])
    assert done.code == 0, done
