"""scripts/bench memory: what a step holds at its peak, from Linux's account of each process."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.processes import REPO, run_to_end, warm_python, warm_server

PATH = os.pathsep.join((str(REPO / "scripts"), str(REPO)))
PNG = b"\x89PNG\r\n\x1a\n"
MB = 1 << 20


def in_fresh_process(script: str, cwd) -> dict:
    """What a script prints as JSON, from a process whose memory nobody has used before."""
    command = warm_server().command("-c", script)
    done = run_to_end(command, cwd=cwd, environ={"PYTHONPATH": PATH})
    assert done.code == 0, done
    return json.loads(done.stdout)


def test_quick_run_prints_the_table_and_writes_json_and_plot(tmp_path):
    """A local step holds next to nothing beyond the three models; AWC is judged beside it."""
    command = [warm_python(), "-m", "benchmarks", "memory", "--quick", "--rounds", "4"]
    command += ["--json", "out.json", "--plot", "out.png"]
    done = run_to_end(command, cwd=tmp_path, environ={"PYTHONPATH": PATH})
    assert done.code == 0, done
    (sheet,) = json.loads((tmp_path / "out.json").read_text())["sheets"]
    local, awc = sheet["lines"]
    assert local["cells"][0] == "local step"
    assert -0.1 < local["cells"][2] < 0.75  # what a fork shares counts for fewer as others end
    assert local["aim"] is None
    assert awc["cells"][0] == "one-peer AWC"
    assert awc["cells"][3] == pytest.approx(awc["cells"][2] - local["cells"][2])
    assert awc["aim"] == "≤ 0.25 models"
    assert awc["met"] == (awc["cells"][3] <= 0.25)
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


def test_a_peak_has_what_was_made_and_what_a_step_held_for_a_moment(tmp_path):
    """64 MB that stay and 48 MB that a step holds for a moment are a peak of 112 MB."""
    script = f"""
import json, torch
from benchmarks.process_memory import peak_of
kept = []
def make():
    kept.append(torch.ones(64 * {MB} // 4))
    return lambda steps: [torch.ones(48 * {MB} // 4).sum() for _ in range(steps)]
print(json.dumps(peak_of(make, 4, lambda: None)))
"""
    assert in_fresh_process(script, tmp_path) / MB == pytest.approx(112, abs=4)


def test_memory_that_two_processes_share_counts_by_half_for_each(tmp_path):
    """64 MB count in full while one process has touched them, and to the half with a second."""
    script = f"""
import json, mmap, os, signal
from benchmarks.process_memory import own_bytes
before = own_bytes()
shared = mmap.mmap(-1, 64 * {MB})
shared.write(b"x" * len(shared))
alone = own_bytes() - before
read, write = os.pipe()
child = os.fork()
if child == 0:
    sum(shared[::4096])
    os.write(write, b"x")
    signal.pause()
os.read(read, 1)
both = own_bytes() - before
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
print(json.dumps([alone, both]))
"""
    alone, both = in_fresh_process(script, tmp_path)
    assert alone / MB == pytest.approx(64, abs=3)
    assert 0.45 < both / alone < 0.6


def test_shared_memory_is_told_from_a_process_s_own(tmp_path):
    """in_shared_memory is True of a slice of a shared tensor, and False of others."""
    script = """
import json, torch
from benchmarks.process_memory import in_shared_memory
own, shared = torch.ones(1 << 20), torch.ones(1 << 20).share_memory_()
print(json.dumps([in_shared_memory(own), in_shared_memory(shared[100:])]))
"""
    assert in_fresh_process(script, tmp_path) == [False, True]
