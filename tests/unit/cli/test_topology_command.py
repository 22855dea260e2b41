"""``asyncddp topology``: its table says what the library says, its errors what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from asyncddp import topology
from asyncddp.cli.topology_command import topology_command


def call(*arguments: str) -> tuple[int, str]:
    """Exit code and everything that was printed."""
    result = CliRunner().invoke(topology_command, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def row(output: str, name: str) -> list[str]:
    """The cells of one row of the table."""
    line = next(line for line in output.splitlines() if line.strip().startswith(name))
    return line.strip().removeprefix(name).split()


def test_table_has_a_row_for_each_name_in_the_given_order():
    """The table has a row of figures for each name, in the order of the arguments."""
    code, output = call("exponential_two", "ring", "one_peer_exponential", "-n", "16")
    assert code == 0
    assert "16 ranks" in output
    assert row(output, "exponential_two(16)") == (
        ["4", "yes", "no", "0.6", "0.4", "-0.2180", "-", "2.11"]
    )
    assert row(output, "ring(16)") == (
        ["2", "yes", "yes", "0.949253", "0.05075", "-0.3333", "-", "1.06"]
    )
    assert row(output, "one_peer_exponential(16)") == (
        ["1", "yes", "no", "0", "1", "0.0000", "4", "0.53"]
    )
    places = [output.index(f"{name}(16)") for name in ("exponential_two", "ring")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", [*topology.GRAPHS, *topology.SCHEDULES])
def test_every_registered_family_can_be_asked_for_with_its_defaults(name):
    """Each registered family is shown for 16 ranks without further options."""
    code, output = call(name, "-n", "16")
    assert code == 0, output
    assert f"{name}(" in output


@pytest.mark.parametrize("name", [*topology.GRAPHS, *topology.SCHEDULES])
def test_every_registered_family_works_on_one_rank(name):
    """Each registered family is shown for one rank, in the singular."""
    code, output = call(name, "-n", "1")
    assert code == 0, output
    assert "1 rank\n" in output.replace(" \n", "\n").replace("  ", "") or "1 rank " in output


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["random_regular", "--degree", "3", "--seed", "5"], "random_regular(12, 3, seed=5)"),
        (["grid_2d", "--shape", "2x6"], "grid_2d(12, (2, 6))"),
        (["base_k", "-k", "3"], "base_k(12, 3)"),
        (["exponential", "--base", "3"], "exponential(12, 3)"),
        (["star", "--center", "2"], "star(12, 2)"),
        (["ring", "--style", "left"], "ring(12, 'left')"),
        (["inner_outer_ring", "--local-size", "6"], "inner_outer_ring(12, 6)"),
        (["matcha", "--graph", "star", "--budget", "0.25"], "matcha(star(12), 0.25, seed=0)"),
        (["one_peer_of", "--graph", "exponential", "--base", "3"], "exponential(12, 3)"),
        (["equi_static", "--undirected", "--seed", "4"], "seed=4, directed=False)"),
        (["equi_dynamic", "--eta", "0.3", "--undirected"], "seed=0, directed=False, eta=0.3)"),
    ],
)
def test_options_reach_the_family(arguments, shown):
    """Each option changes the parameter of the family, as its name in the table shows."""
    code, output = call(*arguments, "-n", "12")
    assert code == 0, output
    assert shown in output


def test_cost_follows_the_link():
    """The speedup follows from bytes, latency and bandwidth, which the table names."""
    slow = call("ring", "--megabytes", "0.001", "--link", "100Gbit,100us")
    assert row(slow[1], "ring(8)")[-1] == "0.07"  # one latency instead of fourteen
    assert "0.001 MB, 100 Gbit/s, 100 µs" in slow[1]


def test_cost_follows_the_machines():
    """Ranks of a machine share its link; what a ring sends stays inside for most of them."""
    arguments = ("--link", "1Gbit,0s", "--ranks-per-machine", "4", "--link-inside", "8Gbit,0s")
    _, output = call("one_peer_exponential", "inner_outer_exponential", *arguments)
    assert row(output, "one_peer_exponential(8)")[-1] == "1.33"  # 1, 2, 4 of a machine's ranks
    assert row(output, "inner_outer_exponential(8, 4)")[-1] == "0.57"  # one; the ring sends 7/4
    words = " ".join(output.split())
    assert "100 MB, 1 Gbit/s, 0 µs; 4 ranks per machine, inside it 8 Gbit/s, 0 µs" in words


def test_without_names_all_families_are_listed_with_their_options():
    """Without arguments all families and parameters are listed, without Sphinx markup."""
    code, output = call()
    assert code == 0
    for name in (*topology.GRAPHS, *topology.SCHEDULES):
        assert name in output
    assert "degree, seed" in output
    assert ":func:" not in output


def test_unknown_name_lists_the_known_ones_and_the_nearest():
    """An unknown name exits with 2, all known names, and the nearest one."""
    code, output = call("exponental_two")
    assert code == 2
    assert "unknown graph or schedule 'exponental_two'; known are: " in output
    assert all(name in output for name in (*topology.GRAPHS, *topology.SCHEDULES))
    assert "Did you mean 'exponential_two'?" in output


def test_unknown_base_graph_lists_graphs_only():
    """An unknown ``--graph`` exits with 2, and the names listed are no schedules."""
    code, output = call("matcha", "--graph", "base_k")
    assert code == 2
    assert "Invalid value for --graph: unknown graph or schedule 'base_k'" in output
    assert "one_peer" not in output


def test_option_that_nobody_takes_is_refused_with_its_owners():
    """An option that no named family takes exits with 2 and the families that take it."""
    code, output = call("ring", "star", "--degree", "3")
    assert code == 2
    assert "--degree means nothing to ring, star" in output
    assert "it belongs to equi_static, random_regular." in output.replace("\n", " ")


def test_impossible_family_is_explained_and_the_others_are_shown():
    """A family that refuses n exits with 1 and the remedy; rows of the others are shown."""
    code, output = call("ring", "hypercube", "-n", "12")
    assert code == 1
    assert "ring(12)" in output
    assert "Error: hypercube needs n to be a power of two, got n=12; nearest: 8, 16" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ring", "-n", "0"], "ring needs n >= 1, got n=0"),
        (["grid_2d", "--shape", "5x"], "got shape=(5, '')"),
        (["random_regular", "--degree", "9"], "needs a degree in 1..7; nearest: degree=7"),
        (["ring", "--megabytes", "-1"], "needs nbytes >= 0"),
    ],
)
def test_wrong_values_fail_with_a_sentence(arguments, message):
    """A value out of bounds exits with 1 and the message of the library, no traceback."""
    code, output = call(*arguments)
    assert code == 1
    assert message in output
    assert "Traceback" not in output


@pytest.mark.parametrize("option", ["--link", "--link-inside"])
def test_other_words_than_a_link_are_refused_with_what_is_expected(option):
    """A link that cannot be read exits with 2, names the option and shows how one is written."""
    code, output = call("ring", option, "fast")
    assert code == 2
    words = " ".join(output.replace("│", " ").split())
    assert f"Invalid value for '{option}': cannot read 'fast' as a link; expected a rate" in words
    assert "such as 100Mbit,20ms" in words


def test_picture_is_written_where_asked_and_named_by_family_where_several(tmp_path):
    """``--draw`` writes one picture under the name given, several with the family appended."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    code, output = call("ring", "--draw", str(tmp_path / "one.png"))
    assert code == 0
    assert f"Wrote {tmp_path / 'one.png'}." in output
    assert call("ring", "base_k", "--draw", str(tmp_path / "two.svg"))[0] == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"one.png", "two-ring.svg", "two-base_k.svg"}
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["missing/ring.png", "ring.strange"])
def test_picture_that_cannot_be_written_fails_with_a_sentence(name, tmp_path):
    """A picture in a missing folder or unknown format exits with 1 and a message."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    code, output = call("ring", "--draw", str(tmp_path / name))
    assert code == 1
    assert "Error: " in output
    assert "Traceback" not in output


def test_help_teaches_with_examples():
    """``--help`` has an example of a comparison and explains the rate."""
    code, output = call("--help")
    assert code == 0
    assert "asyncddp topology exponential_two ring one_peer_exponential -n 16" in output
    assert "0 is exact at once, 1 is never" in " ".join(output.split())


@pytest.mark.launches
def test_importing_the_command_loads_no_graph_library():
    """Importing the command loads no networkx, numpy, torch, mpi4py, rich or scipy."""
    code = (
        "import sys, asyncddp.cli.topology_command as c\n"
        "heavy = {'networkx', 'numpy', 'torch', 'mpi4py', 'rich', 'topology', 'scipy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_matcha_explains_its_budget_and_what_rate_and_gap_are_of():
    """Rounds are drawn at random: the product of the first 16, and the part of links in use."""
    code, output = call("matcha", "ring", "-n", "8")
    assert code == 0
    words = " ".join(output.split())
    assert "matcha(ring(8), 0.5, seed=0): rounds are drawn from the seed and never repeat" in words
    assert "rate of the product of the first 16 rounds" in words
    assert "--budget is the part of them that a round uses on average" in words
    assert "budget" not in call("ring", "-n", "8")[1]
