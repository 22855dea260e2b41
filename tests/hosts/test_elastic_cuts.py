"""Elastic runs between hosts: exactly one side of a network that is cut goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.hosts.namespaces import SCRIPT
from tests.hosts.test_lost_machines import link

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

BODY = """
import os, signal, sys, time
import torch
import asyncddp as bf

bf.init(timeout=100)
rank, count, end = bf.rank(), bf.size(), time.monotonic() + 60
x = torch.tensor([float(bf.rank())])
bf.neighbor_allreduce(x)
bf.barrier()
print("ready", flush=True)
try:
    fewer = 0
    while not fewer and time.monotonic() < end:
        x = bf.neighbor_allreduce(x)
        fewer = bf.allreduce(torch.tensor([float(bf.size() < count)]), op="min").item()
    members = bf.allgather_object(rank)
    print(members, bf.view().number, flush=True)
except bf.IsolatedError as error:
    print("isolated:", error, flush=True)
"""
ENVIRONMENT = {
    "MASTER_ADDR": "10.77.0.1",
    "MASTER_PORT": "29501",
    "ASYNCDDP_ELASTIC": "1",
    "ASYNCDDP_NETWORK_TIMEOUT": "2",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def ranks(hosts, tmp_path):
    """Starts ranks on the hosts whose numbers are given; ends those that are left."""
    del hosts
    script, children = tmp_path / "script.py", []
    script.write_text(BODY)

    def start(*places):
        for rank, place in enumerate(places):
            own = {**ENVIRONMENT, "RANK": rank, "WORLD_SIZE": len(places)}
            words = ["env", *(f"{name}={value}" for name, value in own.items())]
            children.append(
                subprocess.Popen(
                    [str(SCRIPT), f"h{place}", *words, sys.executable, str(script)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for child in children:
            assert child.stdout.readline() == "ready\n"
        return children

    yield start
    link("up")
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    ("places", "stay"),
    [
        pytest.param((1, 1, 2), [0, 1], marks=pytest.mark.nightly, id="more-here"),
        pytest.param((1, 2, 2), [1, 2], id="more-there"),
        pytest.param((1, 2, 2, 1), [0, 3], id="half-with-lowest"),
        pytest.param((1, 2), [0], marks=pytest.mark.nightly, id="one-each"),
    ],
)
def test_exactly_one_side_of_a_cut_goes_on(ranks, places, stay):
    """The side with more ranks, or with the lowest rank of two halves; the others say why not."""
    children = ranks(*places)
    link("down")
    ended = [child.communicate(timeout=60) for child in children]
    for rank, (output, error) in enumerate(ended):
        if rank in stay:
            assert output == f"{stay} 1\n", error
        else:
            assert output.startswith("isolated: "), (output, error)
            assert "too few ranks are left to decide" in output


def test_a_killed_rank_of_another_host_has_ended_for_sure(ranks):
    """Its host refuses connections to it, so that one of two goes on, also the higher one."""
    children = ranks(1, 2)
    children[0].kill()
    output, error = children[1].communicate(timeout=30)
    assert output == "[1] 1\n", error
