"""One Slurm for all tests of this folder."""

import tempfile
from pathlib import Path

import pytest

from tests.slurm.one_node import OneNode, missing

TRAIN = """\
import asyncddp as bf
import torch

bf.init()
mean = bf.allreduce(torch.tensor([float(bf.rank())])).item()
print(f"rank {bf.rank()} of {bf.size()}, {bf.local_rank()} of {bf.local_size()} here, mean {mean}")
"""


@pytest.fixture(scope="package")
def slurm():
    """A node with eight cores and two GPUs by name, and a training script in its folder."""
    problem = missing()
    if problem is not None:
        pytest.skip(f"no Slurm of one node can be made here: {problem}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        (Path(folder) / "train.py").write_text(TRAIN)
        with OneNode(Path(folder)) as node:
            yield node


@pytest.fixture
def pmix(slurm):
    """The same, where srun and Open MPI can meet."""
    if "pmix" not in slurm.call("srun", "--mpi=list").stdout:
        pytest.skip("this Slurm has no PMIx; on Debian: apt-get install libpmix-dev")
    return slurm
