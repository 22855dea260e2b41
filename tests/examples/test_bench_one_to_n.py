"""scripts/bench one-to-n and network-gpt: a GPT on one process and on many."""

from __future__ import annotations

import json

import pytest

from tests.examples.test_bench_network import PATH, PNG, SCRIPTS, spaces
from tests.support.processes import run_to_end, warm_python


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


def run_bench(name: str, folder) -> dict[str, list[dict[str, list[str]]]]:
    files = ["--json", "out.json", "--plot", "out.png"]
    command = [warm_python(), "-m", "benchmarks", name, "--quick", *files]
    done = run_to_end(command, cwd=folder, timeout=280, environ={"PYTHONPATH": PATH})
    assert done.code == 0, done
    assert (folder / "out.png").read_bytes().startswith(PNG)
    found = json.loads((folder / "out.json").read_text())
    return {sheet["table"]: sheet["lines"] for sheet in found["sheets"]}


@pytest.mark.nightly
@pytest.mark.slow
def test_a_quick_run_trains_for_every_table(tmp_path):
    """Each table has a line with a perplexity that a model of 256 bytes can have."""
    sheets = run_bench("one-to-n", tmp_path)
    assert (tmp_path / "out-resumed.png").read_bytes().startswith(PNG)
    found = {
        "equal_tokens",
        "different_data",
        "resumed",
        "averages",
        "rarely",
        "outer",
        "by_gossip",
    }
    assert found <= set(sheets)
    for lines in sheets.values():
        (line,) = lines
        assert 1 < float(line["cells"][1]) < 300, line


@pytest.mark.nightly
@pytest.mark.hosts
@pytest.mark.slow
def test_a_quick_run_trains_between_hosts(tmp_path):
    """ddp is the unit of time and bytes; the hosts are gone afterwards."""
    from benchmarks.network.hosts import refusal

    if problem := refusal():
        pytest.skip(problem)
    (lines,) = run_bench("network-gpt", tmp_path).values()
    assert not spaces()
    ddp, gossip = (line["cells"] for line in lines)
    assert ddp[0] == "ddp"
    assert float(ddp[3]) == float(ddp[5]) == 1
    assert gossip[0] == "adapt_with_combine"
    assert float(gossip[5]) < 0.7  # one model a step in place of one and a half
