"""What a script sees under ``asyncddp run``: what it would see under ``python``, on every rank."""

import json
import os
import pty
import subprocess
import sys

import pytest

from asyncddp.launch.machine_limits import cores

SHOW = """
import json, os, sys
print(json.dumps({
    "rank": int(os.environ["OMPI_COMM_WORLD_RANK"]),
    "argv": sys.argv,
    "name": __name__,
    "file": globals().get("__file__"),
    "path": sys.path[0],
    "environment": dict(os.environ),
    "imported": sorted(sys.modules),
}), flush=True)
"""
HOSTILE = ["a b", "'", '"', "$HOME", "$(touch x)", "`id`", "*", "\\", "", "-np", "--", "ü"]


def seen(ended):
    """What each rank printed, by rank."""
    assert ended.code == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    return sorted(found, key=lambda one: one["rank"])


def test_every_rank_runs_the_script_as_python_would(run):
    """On each rank ``sys.argv``, ``__name__``, ``__file__`` and ``sys.path[0]`` are python's."""
    script = run.script(SHOW)
    ranks = seen(run("-np", "3", script, "--lr", "0.1"))
    assert [one["rank"] for one in ranks] == [0, 1, 2]
    for one in ranks:
        assert one["argv"] == [script, "--lr", "0.1"]
        assert one["name"] == "__main__"
        assert one["file"] == script
        assert one["path"] == str(run.folder)


def test_a_script_that_does_not_use_the_library_does_not_pay_for_it(run):
    """The rank's launcher module imports none of torch, MPI, networkx and click."""
    (one,) = seen(run("-np", "1", run.script(SHOW)))
    assert not {"torch", "mpi4py.MPI", "networkx", "click"} & set(one["imported"])


def test_arguments_arrive_unchanged(run):
    """Arguments with blanks, quotes or shell syntax reach each rank's ``sys.argv`` unchanged."""
    (one, other) = seen(run("-np", "2", run.script(SHOW), *HOSTILE))
    assert one["argv"][1:] == other["argv"][1:] == HOSTILE
    assert not (run.folder / "x").exists()


def test_a_module_is_run_as_python_does(run):
    """``-m MODULE`` runs a module with python's ``sys.argv`` and ``sys.path[0]``."""
    run.script(SHOW)
    (one,) = seen(run("-np", "1", "-m", "script", "-m", "x"))
    assert one["argv"] == [str(run.folder / "script.py"), "-m", "x"]
    assert one["path"] == str(run.folder)


def test_a_leading_python_is_understood(run):
    """``python -u SCRIPT`` as the program runs the script with its arguments."""
    ranks = seen(run("-np", "2", sys.executable, "-u", run.script(SHOW), "1"))
    assert [one["argv"][1:] for one in ranks] == [["1"], ["1"]]


def test_another_program_is_run_as_it_is(run):
    """A program that is no Python script gets its arguments unchanged on every rank."""
    ended = run("-np", "2", "sh", "-c", 'echo "$0 $1"', "a b", "$c")
    assert (ended.code, ended.stdout) == (0, "a b $c\n" * 2)


def test_variables_reach_the_ranks(run):
    """``-x VAR`` passes the variable on, ``-x VAR=value`` sets it, with any characters."""
    run.environment["FROM_HERE"] = "x y"
    ranks = seen(run("-np", "2", "-x", "FROM_HERE", "-x", "LR=a=b c;$d", run.script(SHOW)))
    for one in ranks:
        assert one["environment"]["FROM_HERE"] == "x y"
        assert one["environment"]["LR"] == "a=b c;$d"


def test_torch_distributed_finds_its_world(run):
    """As libraries do that join it where they see an MPI launcher: accelerate, the Trainer."""
    script = run.warm(
        "import os, torch, torch.distributed as dist\n"
        "import asyncddp as bf\n"
        "dist.init_process_group('gloo')\n"
        "bf.init()\n"
        "mine = torch.tensor([1.0 + dist.get_rank()])\n"
        "dist.all_reduce(mine)\n"
        "assert (bf.rank(), bf.size()) == (dist.get_rank(), dist.get_world_size())\n"
        "local = os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE']\n"
        "print(mine.item(), bf.allreduce(mine).item(), *local, flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    ended = run("-np", "2", *script)
    assert sorted(ended.stdout.splitlines()) == ["3.0 3.0 0 2", "3.0 3.0 1 2"], ended.stderr
    assert ended.code == 0


def test_a_world_of_torch_that_the_user_has_set_stays(run):
    """If the user has set ``WORLD_SIZE``, it stays and ``RANK`` is not set."""
    (one,) = seen(run("-np", "1", "-x", "WORLD_SIZE=1", run.script(SHOW)))
    assert one["environment"]["WORLD_SIZE"] == "1"
    assert "RANK" not in one["environment"]


def test_threads_are_shared_out_unless_the_user_has(run):
    """Ranks have ``OMP_NUM_THREADS`` of cores / ranks, at least 1, or the user's value if given."""
    run.environment.pop("OMP_NUM_THREADS", None)
    for count in (1, 4):
        ranks = seen(run("-np", str(count), run.script(SHOW)))
        shares = [int(one["environment"]["OMP_NUM_THREADS"]) for one in ranks]
        assert shares == [max(1, cores() // count)] * count
    run.environment["OMP_NUM_THREADS"] = "7"
    (one,) = seen(run("-np", "1", run.script(SHOW)))
    assert one["environment"]["OMP_NUM_THREADS"] == "7"


def test_machines_are_simulated(run):
    """``--ranks-per-machine N`` sets ``ASYNCDDP_RANKS_PER_MACHINE`` to N."""
    (one,) = seen(run("-np", "1", "--ranks-per-machine", "2", run.script(SHOW)))
    assert one["environment"]["ASYNCDDP_RANKS_PER_MACHINE"] == "2"


def test_lines_are_tagged_with_their_rank(run):
    """``--tag-output`` puts the rank and the stream before each line."""
    ended = run("-np", "2", "--tag-output", run.script("print('hello')"))
    assert sorted(ended.stdout.split("\n")[:2]) == ["[1,0]<stdout>: hello", "[1,1]<stdout>: hello"]


def test_ranks_read_nothing_and_leave_standard_input_to_the_shell(run):
    """So that a run inside ``while read line`` does not swallow the lines."""
    script = run.script("import sys\nprint(repr(sys.stdin.read()))\n")
    for given in (subprocess.PIPE, subprocess.DEVNULL):
        child = run.start("-np", "2", script, stdin=given)
        assert run.finish(child, None if child.stdin is None else "x\n").stdout == "''\n" * 2


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_line_is_shown_as_soon_as_it_is_written(run, stream):
    """A line of a rank appears before the rank ends, on stdout and on stderr."""
    script = f"import sys, time\nprint('epoch', 1, file=sys.{stream})\ntime.sleep(300)\n"
    child = run.start("-np", "1", run.script(script))
    assert getattr(child, stream).readline() == "epoch 1\n"
    child.terminate()
    assert run.finish(child).code == 143


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_on_a_terminal_a_progress_bar_moves(run, stream):
    """On a terminal an unfinished line of a rank appears at once, on stdout and on stderr."""
    script = f"import sys, time\nprint('\\r50%', end='', flush=True, file=sys.{stream})\n"
    ours, theirs = pty.openpty()
    child = run.start("-np", "1", run.script(script + "time.sleep(300)\n"), **{stream: theirs})
    os.close(theirs)
    shown = b""
    while len(shown) < 4:
        shown += os.read(ours, 4)
    assert shown == b"\r50%"
    child.terminate()
    assert run.finish(child).code == 143
    os.close(ours)


def test_no_byte_of_much_output_is_lost(run):
    """All of 20,000 lines on stderr arrive whole and in order."""
    lines = 20_000
    script = f"import sys\nfor n in range({lines}): sys.stderr.write(f'{{n}} ' + '-' * 61 + '\\n')"
    ended = run("-np", "1", run.script(script))
    assert ended.stderr.splitlines() == [f"{n} {'-' * 61}" for n in range(lines)]


def test_an_exit_code_of_zero_by_any_way_is_success(run):
    """``sys.exit()``, ``sys.exit(0)`` and the end of the script all exit with 0."""
    for end in ("sys.exit()", "sys.exit(0)", "pass"):
        assert run("-np", "2", run.script(f"import sys\n{end}")).code == 0


def test_an_atexit_function_still_has_the_scripts_names(run):
    """Functions registered with ``atexit`` can still read the script's globals."""
    script = "import atexit\nword = 'bye'\natexit.register(lambda: print(word))\n"
    assert run("-np", "1", run.script(script)).stdout == "bye\n"


def test_classes_of_the_script_can_be_pickled_to_a_spawned_process(run):
    """What a DataLoader with workers does."""
    script = (
        "import multiprocessing\n"
        "class Sample:\n"
        "    def __init__(self, n): self.n = n\n"
        "def work(sample): return sample.n + 1\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(work, [Sample(1)]))\n"
    )
    ended = run("-np", "1", run.script(script))
    assert (ended.stdout, ended.code) == ("[2]\n", 0), ended.stderr


PIECES = """
import sys
for number in range(1000):
    print("a", "b", "c", number)
    print("a", "b", "c", number, file=sys.stderr)
"""


@pytest.mark.parametrize("launcher", ["mpirun", "local"])
def test_lines_of_ranks_do_not_mix_without_buffers(run, launcher):
    """``PYTHONUNBUFFERED`` writes the pieces of a ``print`` one by one; a rank writes lines."""
    run.environment["PYTHONUNBUFFERED"] = "1"
    ended = run("--launcher", launcher, "-np", "4", run.script(PIECES))
    expected = sorted([f"a b c {number}" for number in range(1000)] * 4)
    assert sorted(ended.stdout.splitlines()) == expected
    assert sorted(ended.stderr.splitlines()) == expected
