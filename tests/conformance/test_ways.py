"""How many files an average passes through, and how often its calls climb a layer."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

import asyncddp as bf
from tests.support import on

REPO = Path(__file__).resolve().parents[2]
LIBRARY = str(REPO / "asyncddp") + "/"


def levels():
    """The height of each room, by the order of layers in pyproject.toml."""
    layers = re.search(
        r"\nlayers = \[\n(.*?)\n\]", (REPO / "pyproject.toml").read_text(), re.DOTALL
    )
    rows = layers[1].splitlines()
    return {room: -k for k, row in enumerate(rows) for room in re.findall(r"\w+", row)}


def way_of(call):
    """The files of the library that a call enters, and the steps from a lower to a higher room."""
    height, files, climbs = levels(), set(), set()

    def place(frame):
        while frame is not None and not frame.f_code.co_filename.startswith(LIBRARY):
            frame = frame.f_back
        return frame and frame.f_code.co_filename.removeprefix(LIBRARY)

    def room(file):
        return height.get(file.partition("/")[0].removesuffix(".py"), 0)

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            entered, caller = place(frame), place(frame.f_back)
            files.add(entered)
            if caller is not None and room(entered) > room(caller):
                climbs.add((caller, entered))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files, climbs


def first():
    x, average = torch.ones(1000), bf.neighbor_allreduce  # which imports it
    ways = []
    for number in range(8):  # beside other work some wait, and look who is lost
        bf.barrier()
        ways.append(way_of(lambda name=f"first {number}": average(x, name=name)))
    bf.barrier()
    files, climbs = min(ways, key=lambda way: len(way[0]))
    assert len(files) <= 38, sorted(files)
    assert len(climbs) <= 2, climbs
    assert len([file for file in files if file.startswith("ops/")]) <= 4, files


def repeated():
    x = torch.ones(1000)
    ways = []
    for _ in range(30):  # beside other work most ways wait
        ways.append(way_of(lambda: bf.neighbor_allreduce(x, name="w")))
        bf.barrier()
    files, climbs = min(
        ways[3:], key=lambda way: len(way[0])
    )  # a neighbour that comes late takes the engine
    assert len(files) <= 15, files
    assert len(climbs) <= 2, climbs
    assert "ops/neighbor_allreduce.py" in files


@on("loopback-2", "shared_memory-2")
def test_a_repeated_average_is_a_short_way(world):
    """At most 15 files, and at most two kinds of call from a lower layer to a higher one."""
    world.run(repeated)


@on("loopback-2", "shared_memory-2")
def test_a_first_average_passes_few_files_of_the_verbs(world):
    """The engine does it by message: at most four files of ops, and at most two climbs."""
    world.run(first)
