"""scripts/bench sharded: a GPT in shards between hosts, beside HSDP and the guide's formula."""

from __future__ import annotations

import json

import pytest

from tests.examples.test_bench_network import PATH, PNG, SCRIPTS, spaces
from tests.support.processes import run_to_end, warm_python


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


@pytest.mark.nightly
@pytest.mark.hosts
@pytest.mark.slow
def test_a_quick_run_measures_every_method_beside_the_formula(tmp_path):
    """All learn, and send by their host's interface what the formula says, and headers."""
    from benchmarks.network.hosts import refusal

    if problem := refusal():
        pytest.skip(problem)
    files = ["--json", "out.json", "--plot", "out.png"]
    command = [warm_python(), "-m", "benchmarks", "sharded", "--quick", *files]
    done = run_to_end(command, cwd=tmp_path, timeout=280, environ={"PYTHONPATH": PATH})
    assert done.code == 0, done
    assert not spaces()
    assert "torchft's DiLoCo was not measured: it is not installed" in done.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)
    found = json.loads((tmp_path / "out.json").read_text())
    losses, steps, used = (
        {line["cells"][0]: line["cells"][1:] for line in sheet["lines"]}
        for sheet in found["sheets"]
    )
    assert list(steps) == list(used) == ["replicas alone", *losses]
    assert len(losses) == 5
    for loss, _, _, formula, measured in losses.values():
        assert 1 < float(loss) < 5.6  # log(256) = 5.55
        assert 0.99 < float(measured) / float(formula) < 2  # a model of 15 thousand parameters
    sent = {name: float(cells[-1]) for name, cells in losses.items()}
    assert sent["diloco, H = 10"] < sent["noloco, H = 10"] < sent["HSDP"] / 4
    assert sent["choco_sgd, sign"] < sent["adapt_then_combine, one peer"] / 15
    assert all(row["median"] > 0.01 for row in found["results"])  # of the layers alone


def test_a_step_by_the_formula_has_its_messages_and_its_bytes():
    """On top of the replicas alone: messages in a row times the delay, and bytes over the rate."""
    from benchmarks.sharded import ALONE, HSDP, _Link
    from benchmarks.tables import TimingRow

    model = 1_000_000  # bytes: 80 ms over the link
    rows = {
        name: TimingRow("", name, model, 10, [seconds] * 3)
        for name, seconds in ((ALONE, 0.1), (HSDP, 0.4), ("one_peer", 0.2), ("diloco", 0.125))
    }
    link = _Link("100 Mbit/s, 20 ms", 1e8, 0.02, rows, {})
    assert link.cells(ALONE) == ("100 ±0% [100]", "100% [100%]")
    assert link.cells(HSDP) == ("400 ±0% [300]", "25% [33%]")
    assert link.cells("one_peer") == ("200 ±0% [200]", "50% [50%]")
    assert link.cells("diloco") == ("125 ±0% [112]", "80% [89%]")
