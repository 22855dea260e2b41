"""scripts/bench network-methods: steps, bytes, a slow rank and accuracy between hosts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.examples.test_bench_network import PATH, PNG, SCRIPTS, spaces
from tests.support.processes import REPO, run_to_end, warm_python

METHODS = ["DDP gloo", "bytegrad", "decentralized, shift_one", "async_model_average"]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


@pytest.mark.nightly
@pytest.mark.hosts
@pytest.mark.slow
def test_a_quick_run_measures_and_trains_over_a_long_link(tmp_path):
    """Nobody who waits for a host 5 ms away is faster than that; the hosts are gone afterwards."""
    from benchmarks.network.hosts import refusal

    if problem := refusal():
        pytest.skip(problem)
    files = ["--json", "out.json", "--plot", "out.png"]
    command = [warm_python(), "-m", "benchmarks", "network-methods", "--quick", *files]
    done = run_to_end(command, cwd=tmp_path, timeout=200, environ={"PYTHONPATH": PATH})
    assert done.code == 0, done
    assert not spaces()
    found = json.loads((tmp_path / "out.json").read_text())
    speed, sent, slow, accuracy = (
        {line["cells"][0]: line["cells"][1:] for line in sheet["lines"]}
        for sheet in found["sheets"]
    )
    assert list(speed) == ["local step", *METHODS, "a step of DDP's"]
    assert speed["DDP gloo"] == [1]
    assert list(slow) == list(accuracy) == ["local step", *METHODS]
    assert 0.25 <= sent["bytegrad"][0] < 0.27
    assert 1 <= sent["decentralized, shift_one"][0] < 1.05
    timed = {(row["table"], row["rival"]): row["median"] for row in found["results"]}
    place = "methods, 2 hosts, 1 Gbit/s, 5 ms, "
    assert all(timed[f"{place}1", name] >= 0.035 for name in METHODS[:3])
    assert timed[f"{place}6", "bytegrad"] > 0.18 > timed[f"{place}6", "async_model_average"]
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


CONNECT = """
import socket, sys, time
if sys.argv[1] == "serve":
    with socket.create_server(("0.0.0.0", 7000)) as server:
        print("ready", flush=True)
        for _ in range(5):
            server.accept()[0].close()
else:
    for _ in range(5):
        start = time.perf_counter()
        socket.create_connection((sys.argv[1], 7000)).close()
        print(time.perf_counter() - start)
"""


@pytest.mark.hosts
def test_frames_take_their_time_in_each_direction(tmp_path):
    """To connect is to wait for an answer: 10 ms where a frame takes 5, and not much more."""
    from benchmarks.network.hosts import HostNetwork, hosts, refusal

    if problem := refusal():
        pytest.skip(problem)
    script = tmp_path / "connect.py"
    script.write_text(CONNECT)
    on_host = [str(REPO / "scripts" / "testhosts")]
    with hosts(HostNetwork(2, "unlimited", 0.005)):
        words = [*on_host, "h1", f"{sys.executable} {script} serve"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            done = run_to_end([*on_host, "h2", f"{sys.executable} {script} h1"], cwd=tmp_path)
            server.wait(10)
    assert done.code == 0, done
    taken = sorted(map(float, done.stdout.split()))
    assert len(taken) == 5
    assert taken[0] >= 0.010
    assert taken[2] < 0.050
    assert not spaces()
