"""``asyncddp compare``: its figures are those of the library, its errors say what to do."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from asyncddp import simulate, topology
from asyncddp.cli.compare_command import compare_command
from asyncddp.topology import Link, Links
from tests.support.processes import run_to_end, warm_server

SMALL = ("--problem", "least_squares", "--steps", "20", "--ranks", "8")


def call(*arguments):
    """Exit code and everything that was printed."""
    result = CliRunner().invoke(compare_command, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def records(file):
    """The rows of a table that was written."""
    with file.open(encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def row(output, name):
    """The cells of one row of the table."""
    line = next(line for line in output.splitlines() if line.strip().startswith(f"{name} "))
    return line.strip().removeprefix(name).split()


def test_the_table_has_what_the_library_computes():
    """A row a method, with the figures of ``simulate.train`` on the same problem."""
    code, output = call(
        "adapt_then_combine", "gradient_allreduce", *SMALL,
        "--topology", "base_k", "-k", "2", "--link", "100Mbit,20ms", "--lr", "0.05",
    )  # fmt: skip
    assert code == 0, output
    run = simulate.train(
        simulate.least_squares(8),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        topology=topology.base_k(8, 2),
        steps=20,
        scenario=simulate.Scenario(links="100Mbit,20ms"),
    )
    assert row(output, "adapt_then_combine") == [
        f"{run.loss[-1]:.4g}", f"{run.error[-1]:.3g}", f"{run.consensus_distance[-1]:.3g}",
        *f"{run.bytes_sent[-1] / 1e3:.2f} kB".split(), f"{run.seconds[-1]:.4g}",
    ]  # fmt: skip
    assert "least squares, 8 ranks, base_k(8, 2)" in output
    assert "100 Mbit/s, 20 ms" in output
    assert row(output, "gradient_allreduce")[2] == "0"  # all hold one model


def test_settings_follow_a_colon():
    """NAME:key=value reaches the method, and its row says so."""
    code, output = call("adapt_then_combine:num_steps_per_communication=5", *SMALL)
    assert code == 0, output
    found = row(output, "adapt_then_combine, num_steps_per_communication=5")
    plain = row(call("adapt_then_combine", *SMALL)[1], "adapt_then_combine")
    assert found[3:5] == ["1.54", "kB"]  # 4 times 128 bytes to 3 neighbours
    assert plain[3:5] == ["7.68", "kB"]
    ring = call("adapt_then_combine", *SMALL, "--topology", "ring")[1]
    named = call("adapt_then_combine:topology=ring", *SMALL)[1]
    assert row(named, "adapt_then_combine") == row(ring, "adapt_then_combine") != plain


def test_methods_between_machines_have_a_topology_of_machines(tmp_path):
    """By the command line: --ranks over --ranks-per-machine nodes, beside one of ranks."""
    table, between = tmp_path / "runs.csv", "communication='hierarchical_neighbor_allreduce'"
    command = warm_server().command(
        "-m", "asyncddp", "compare",
        "adapt_then_combine", f"adapt_then_combine:{between}", "choco_sgd:hierarchical=True",
        *SMALL, "--topology", "ring", "--ranks", "12", "--ranks-per-machine", "3",
        "--csv", str(table),
    )  # fmt: skip
    done = run_to_end(command)
    assert done.code == 0, done
    assert "least squares, 12 ranks, ring(12), ring(4) of machines" in done.stdout
    links = Links(Link.parse("10Gbit,50us"), 3, Link.parse("80Gbit,2us"))
    for name, graph, settings in (
        ("adapt_then_combine", topology.ring(12), {}),
        ("adapt_then_combine", topology.ring(4), {"communication": between[15:-1]}),
        ("choco_sgd", topology.ring(4), {"hierarchical": True}),
    ):
        run = simulate.train(
            simulate.least_squares(12),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            name,
            topology=graph,
            steps=20,
            scenario=simulate.Scenario(links=links),
            **settings,
        )
        rows = [one for one in records(table) if one["method"] == run.method]
        found = {one["measure"]: float(one["value"]) for one in rows if one["step"] == "20"}
        assert found["error"] == pytest.approx(run.error[-1], rel=1e-12)
        assert found["consensus_distance"] == pytest.approx(run.consensus_distance[-1], rel=1e-9)


def test_a_topology_that_fits_machines_alone():
    """A hypercube of two machines, but none of six ranks, which the other method would need."""
    more = (*SMALL, "--ranks", "6", "--ranks-per-machine", "3", "--topology", "hypercube")
    code, output = call("choco_sgd:hierarchical=True", "gradient_allreduce", *more)
    assert code == 0, output
    assert "least squares, 6 ranks, hypercube(2) of machines" in output
    code, output = call("choco_sgd:hierarchical=True", "adapt_then_combine", *more)
    assert code == 1
    assert row(output, "choco_sgd, hierarchical=True")
    assert "adapt_then_combine: hypercube needs n to be a power of two, got n=6" in output


def test_a_scenario_changes_time_and_bytes():
    """Slow ranks and a larger model take longer; the size of the model scales all bytes."""
    plain, slow, large = (
        call("adapt_then_combine", *SMALL, "--topology", "ring", *more)[1]
        for more in ((), ("--slow", "3:10"), ("--megabytes", "100"))
    )
    seconds = [float(row(one, "adapt_then_combine")[-1]) for one in (plain, slow, large)]
    assert 8 * seconds[0] < seconds[1]
    assert 2 * seconds[0] < seconds[2]
    assert row(large, "adapt_then_combine")[3:5] == ["4.00", "GB"]  # 20 steps to 2 neighbours


def test_ranks_that_leave_leave_in_the_simulation(tmp_path):
    """--leave is Scenario's departures: of ranks 2 and 5, after 4 and 11 steps."""
    table = tmp_path / "runs.csv"
    leaving = ("--leave", "2:4", "--leave", "5:11", "--csv", str(table))
    code, output = call("choco_sgd", *SMALL, "--topology", "ring", *leaving)
    assert code == 0, output
    run = simulate.train(
        simulate.least_squares(8),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "choco_sgd",
        topology=topology.ring(8),
        steps=20,
        scenario=simulate.Scenario(departures={2: 4, 5: 11}),
    )
    rows = [one for one in records(table) if one["step"] == "20"]
    found = {one["measure"]: float(one["value"]) for one in rows}
    assert found["error"] == pytest.approx(run.error[-1], rel=1e-12)


def test_ranks_that_do_not_wait_need_not_wait_for_a_slow_one():
    """In step the slow rank sets the pace, of win_put too; asynchronously it does not."""
    more = ("win_put", "adapt_then_combine", *SMALL, "--topology", "ring", "--slow", "3:10")
    in_step, free = call(*more)[1], call(*more, "--asynchronous")[1]
    assert float(row(free, "win_put")[-1]) < 0.3 * float(row(in_step, "win_put")[-1])
    assert row(free, "adapt_then_combine") == row(in_step, "adapt_then_combine")


def test_all_records_as_a_table_and_a_picture(tmp_path):
    """The files have a row for each record and measure, and axes for steps, bytes and seconds."""
    pytest.importorskip("matplotlib")
    table, picture = tmp_path / "runs.csv", tmp_path / "runs.png"
    code, output = call(
        "adapt_then_combine", "adapt_with_combine", *SMALL,
        "--every", "5", "--csv", str(table), "--plot", str(picture),
    )  # fmt: skip
    assert code == 0, output
    rows = records(table)
    assert {one["method"] for one in rows} == {"adapt_then_combine", "adapt_with_combine"}
    errors = [one for one in rows if one["measure"] == "error"]
    assert [int(one["step"]) for one in errors] == 2 * [0, 5, 10, 15, 20]
    assert float(errors[0]["value"]) == pytest.approx(1.0)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"Wrote {picture}." in output


def test_a_method_that_cannot_is_named_after_the_others():
    """The table has those that can; the error says what the other needs; the command fails."""
    code, output = call("choco_sgd", "adapt_then_combine", *SMALL, "--topology", "base_k")
    assert code == 1
    assert row(output, "adapt_then_combine")
    assert "choco_sgd cannot run on base_k(8, 1)" in output
    assert output.index("seconds ") < output.index("choco_sgd cannot run")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "Missing argument 'METHOD"),
        (("adapt_than_combine", *SMALL), 2, "Did you mean 'adapt_then_combine'?"),
        (("adapt_then_combine", *SMALL, "--topology", "rign"), 2, "Did you mean 'ring'?"),
        (("adapt_then_combine", *SMALL, "-k", "2"), 2, "name it by --topology"),
        (
            ("adapt_then_combine", *SMALL, "--topology", "ring", "-k", "2"),
            2,
            "-k means nothing to ring",
        ),
        (
            ("adapt_then_combine", *SMALL, "--topology", "hypercube", "--ranks", "6"),
            2,
            "power of two",
        ),
        (
            ("choco_sgd:hierarchical=True", *SMALL, "--topology=ring", "--ranks-per-machine", "3"),
            2,
            "8 ranks are no whole number of machines with ranks_per_machine=3",
        ),
        (("adapt_then_combine:lr", *SMALL), 2, "expected NAME:key=value"),
        (("adapt_then_combine:lr=3", *SMALL), 2, "argument lr: adapt_then_combine has no such"),
        (("adapt_then_combine", *SMALL, "--slow", "3"), 2, "expected RANK:FACTOR such as 3:10"),
        (("adapt_then_combine", *SMALL, "--slow", "9:2"), 2, "there is no rank 9 among 8"),
        (("adapt_then_combine", *SMALL, "--leave", "2:x"), 2, "expected RANK:STEP such as 5:100"),
        (("adapt_then_combine", *SMALL, "--leave", "2:-1"), 2, "a number of steps of at least 0"),
        (("adapt_then_combine", *SMALL, "--loss", "1.5"), 2, "expected a probability"),
        (("adapt_then_combine", *SMALL, "--retransmit", "0"), 2, "expected a number above 0"),
        (("adapt_then_combine", *SMALL, "--momentum", "-1"), 2, "Invalid momentum value: -1.0"),
        (("adapt_then_combine", *SMALL, "--csv", "no/such.csv"), 1, "There is no folder no"),
        (("adapt_then_combine", *SMALL, "--link", "fast"), 2, "100Mbit,20ms"),
        (("adapt_then_combine", *SMALL, "--alpha", "0.1"), 2, "least squares has none"),
        (("adapt_then_combine", *SMALL, "--labels-per-rank", "1"), 2, "--labels-per-rank shares"),
        (("adapt_then_combine", *SMALL, "--optimizer", "Adm"), 2, "Did you mean 'Adam'?"),
        (
            ("adapt_then_combine", *SMALL, "--optimizer", "Adam", "--momentum", "0.9"),
            2,
            "torch.optim.Adam has no such option",
        ),
        (("adapt_then_combine", *SMALL, "--steps", "0"), 2, "expected a whole number of at least"),
    ],
)
def test_mistakes_are_named_with_the_remedy(arguments, code, message):
    """Before anything is trained: unknown names, options of nobody, ranks that are not there."""
    found, output = call(*arguments)
    assert message in " ".join(output.split())
    assert found == code


def test_an_unknown_method_is_named_before_torch_is_loaded():
    """Loading it takes most of a minute on a busy machine."""
    lines = (
        "import sys",
        "from asyncddp.cli.compare_command import compare_command",
        "try: compare_command(['adapt_then_combin'])",
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)",
    )
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert "Did you mean 'adapt_then_combine'?" in ended.stderr
    assert ended.stdout.endswith("False\n")


def test_help_teaches():
    """What a method is, what seconds are, and whole commands to copy."""
    code, output = call("--help")
    text = " ".join(output.split())
    assert code == 0
    assert "asyncddp compare adapt_then_combine gradient_allreduce" in text
    assert "seconds are a model" in text
    assert "has a --topology of machines: of --ranks over --ranks-per-machine nodes" in text


@pytest.mark.nightly
@pytest.mark.exhaustive
def test_digits_of_real_data_train(tmp_path):
    """The default problem: 64 ranks of scikit-learn's digits, Dirichlet(0.1), learn to read."""
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("needs scikit-learn")
    table = tmp_path / "digits.csv"
    command = warm_server().command(
        "-m", "asyncddp", "compare", "adapt_then_combine", "gradient_allreduce",
        "--topology", "base_k", "--ranks", "64", "--alpha", "0.1", "--steps", "60",
        "--csv", str(table),
    )  # fmt: skip
    done = run_to_end(command)
    assert done.code == 0, done
    assert done.stderr == ""  # no progress where nobody looks
    rows = [one for one in records(table) if one["measure"] == "score"]
    last = [float(one["value"]) for one in rows if one["step"] == "60"]
    assert len(last) == 2
    assert np.min(last) > 0.6
    command = warm_server().command("-m", "asyncddp", "compare", "adapt_then_combine", "-n", "2000")
    done = run_to_end(command)
    assert "digits: argument ranks: expected 1 to 1348" in done.stderr


def test_what_is_sent_again_takes_longer():
    """--loss alone changes the models; with --retransmit it costs time and bytes."""
    more = ("adapt_then_combine", *SMALL, "--topology", "ring")
    plain, lossy = (call(*more, "--loss", p, "--retransmit", "200")[1] for p in ("0", "0.2"))
    one, other = (row(output, "adapt_then_combine") for output in (plain, lossy))
    assert one[:3] == other[:3]
    assert float(one[3]) < float(other[3])
    assert float(other[-1]) > float(one[-1]) + 1
    gone = row(call(*more, "--loss", "0.2")[1], "adapt_then_combine")
    assert gone[1] != one[1]
    assert gone[3:] == one[3:]


def test_a_method_that_has_never_averaged_says_so():
    """Its row would be that of ranks that train alone; another that diverges says that."""
    code, output = call("diloco", "adapt_then_combine", *SMALL)
    assert code == 0
    assert "diloco has sent nothing in 20 steps" in output
    assert "diloco:communication_interval=2." in output
    assert "adapt_then_combine has" not in output
    assert "has sent nothing" not in call("diloco:communication_interval=2", *SMALL)[1]
    output = call("adapt_then_combine", *SMALL, "--steps", "200", "--lr", "1e9")[1]
    assert "adapt_then_combine has diverged: take a smaller --lr." in output


def test_mistakes_are_told_before_anything_is_trained(monkeypatch):
    """A typo in the last method does not cost the time of the others."""
    monkeypatch.setattr("asyncddp.simulate.comparison.train", None)
    for wrong in ("adapt_than_combine", "diloco:communication_interval=x", "win_put:heta=1"):
        assert call("adapt_then_combine", wrong, *SMALL)[0] == 2


def test_the_help_has_no_ranges_without_bounds():
    """click tells those as ``x<=None``."""
    assert "None" not in call("--help")[1]


def test_the_command_is_read_without_torch():
    """Help, and mistakes in the options, come at once."""
    code = (
        "import sys; from asyncddp.cli.compare_command import compare_command as command;"
        "command(['x', '--slow', '1', '--help'], standalone_mode=False);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
