"""scripts/bench compression: every compressor beside a copy."""

from __future__ import annotations

import json
import os
import re

import pytest

from asyncddp.compression import COMPRESSORS
from tests.support.processes import REPO, run_to_end, warm_python

PATH = os.pathsep.join((str(REPO / "scripts"), str(REPO)))
PNG = b"\x89PNG\r\n\x1a\n"


def test_quick_run_prints_the_table_and_writes_json_and_plot(tmp_path):
    """A line for each compressor of the registry, with the ratios of its medians to the copy's."""
    command = [warm_python(), "-m", "benchmarks", "compression", "--quick"]
    command += ["--rounds", "3"]
    command += ["--json", "out.json", "--plot", "out.png"]
    done = run_to_end(command, cwd=tmp_path, environ={"PYTHONPATH": PATH})
    assert done.code == 0, done
    found = json.loads((tmp_path / "out.json").read_text())
    (sheet,) = found["sheets"]
    names = [line["cells"][0] for line in sheet["lines"]]
    assert names == ["copy", *COMPRESSORS, "sign, error feedback"]
    medians = {(row["table"], row["rival"]): row["median"] for row in found["results"]}
    assert all(len(row["rounds"]) == 3 and min(row["rounds"]) > 0 for row in found["results"])
    for line in sheet["lines"][1:]:
        name, bits, *cells = line["cells"]
        assert 0 < float(bits) <= 32
        for what, cell in zip(("encode", "decode", "decode_add"), cells, strict=True):
            rate, ratio = re.fullmatch(r"([\d.e+-]+) ±\d+% \[([\d.e+-]+)\]", cell).groups()
            seconds = medians[what, name]
            assert float(ratio) == pytest.approx(seconds / medians["copy", "copy"], rel=0.01)
            assert float(rate) == pytest.approx(256 * 1024 / seconds / 1e9, rel=0.01)
    assert "compression of 256 KB on one core" in done.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)
