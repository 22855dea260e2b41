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
OWN = "MINE = 'of the user'\n"
TRAINS = """
import topology
assert topology.MINE == "of the user"
import torch
import asyncddp as bf
from asyncddp.topology import one_peer_exponential
bf.init(timeout=60)
model = torch.nn.Linear(3, 1)
optimizer = bf.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model, topology=one_peer_exponential(bf.size())
)
for step in range(4):
    model(torch.full((2, 3), float(bf.rank()))).sum().backward()
    optimizer.step()
received = bf.broadcast_object(one_peer_exponential(2), 0)
assert received.name == "one_peer_exponential(2)" and type(received) is bf.topology.Schedule
with bf.local_world(2) as world:
    world.run(lambda: bf.set_topology(bf.topology.ring(2)))
import topology
assert topology.MINE == "of the user"
"""


@pytest.mark.parametrize(
    "first", ["import topology", "import asyncddp.topology", "import asyncddp"]
)
def test_both_names_are_of_the_same_modules(first):
    """Each class is there once, in whatever order the names are imported, also for pickle."""
    done = run_to_end([sys.executable, "-W", "error", "-c", SAME.format(first=first)])
    assert done.code == 0, done


def test_the_command_line_works_in_a_folder_with_a_topology_of_its_own(tmp_path):
    """``python -m`` puts the folder first on the path, for ranks too."""
    (tmp_path / "topology.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "train.py").write_text(TRAINS, encoding="utf-8")
    asyncddp = [sys.executable, "-m", "asyncddp"]
    for words in (
        ["topology", "ring", "-n", "4"],
        ["run", "--launcher", "local", "-np", "2", "train.py"],
    ):
        done = run_to_end([*asyncddp, *words], cwd=tmp_path)
        assert done.code == 0, done
