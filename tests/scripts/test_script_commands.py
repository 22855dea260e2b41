"""The commands of scripts/: each teaches itself, refuses what it cannot do, is shellcheck-clean."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def run(*command, cwd=REPO, **environ):
    """Run a script of this clone in the environment of these tests."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("script", ["train", "test", "check", "docs", "notebooks", "release"])
def test_help_teaches_from_anywhere_without_installing(tmp_path, script):
    """--help explains the script from any folder, and makes no environment for that."""
    done = run(REPO / "scripts" / script, "--help", cwd=tmp_path, ASYNCDDP_VENV="/nowhere/venv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: scripts/{script}")


def test_the_help_of_what_train_runs_is_printed_once(tmp_path):
    """Not once for each rank."""
    (tmp_path / "asyncddp").write_text('#!/bin/sh\nprintf "%s\\n" "$*"\n')
    (tmp_path / "asyncddp").chmod(0o755)
    command = f". scripts/lib/environment.sh; prepare_environment() {{ PATH={tmp_path}:$PATH; }}"
    script = (
        (REPO / "scripts" / "train")
        .read_text()
        .replace('. "$(dirname -- "${BASH_SOURCE[0]}")/lib/environment.sh"', command)
    )
    for options in (["--", "--help"], ["--", "-h"], ["-np", "3", "--epochs", "1", "--help"]):
        done = run("bash", "-c", script, "train", *options)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("run -np 1 "), done.stdout
    assert run("bash", "-c", script, "train", "--smoke").stdout.startswith("run -np 4 ")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "-np", "0"], "train: -np needs a number of ranks of at least 1, got '0'"),
        (["train", "-np"], "train: -np needs a number of ranks of at least 1, got ''"),
        (["test", "torch", "--torch"], "test: --torch needs a version, such as --torch 2.6.0; got"),
        (["test", "--lowest", "--torch", "2.6"], "test: --lowest has a torch of its own: give"),
        (["test", "--lightning", "new"], "test: --lightning needs a version, such as --"),
        (["test", "--lightning", "2.2", "--lowest"], "test: --lowest has a Lightning of its own:"),
        (["test", "nowhere"], "test: no area 'nowhere' in tests; there are: "),
        (["check", "nowhere"], "check: no gate 'nowhere'; there are: format lint"),
        (["docs", "--fast"], "docs: no option '--fast'; there are: --open --serve"),
        (["notebooks", "nowhere"], "notebooks: no notebook 'nowhere'; there are: 1_average_conse"),
        (["notebooks", "--fast"], "notebooks: no option '--fast'; see scripts/notebooks --help"),
    ],
)
def test_wrong_arguments_are_one_sentence(command, message):
    """A wrong argument is named with what would do, before anything is installed."""
    done = run(REPO / "scripts" / command[0], *command[1:], ASYNCDDP_VENV="/nowhere/venv")
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1


def test_areas_in_the_help_are_the_folders_of_tests():
    """The areas that the help names are those that hold tests, this one among them."""
    areas = re.search(r"Areas: (.*)", run(REPO / "scripts" / "test", "--help").stdout)
    assert areas
    named = areas.group(1).split()
    assert "scripts" in named
    assert all((REPO / "tests" / name).is_dir() for name in named)


def shell_scripts():
    """Our shell scripts, found by their first line, so that a new one is covered unasked."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPO, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        names = ["set_conda_down.sh", *(f"scripts/{name}" for name in ("train", "test", "check"))]
    else:
        names = [name for name in listed.stdout.splitlines() if not name.endswith(".py")]
    marks = re.compile(rb"#!.*[/ ](ba)?sh\b|# shellcheck shell=")
    files = [name for name in names if (REPO / name).is_file()]
    return [name for name in files if marks.match((REPO / name).read_bytes()[:80])]


def test_every_shell_script_stops_at_its_first_error():
    """``scripts/check shell`` holds them to shellcheck."""
    names = shell_scripts()
    assert {"set_conda_down.sh", "scripts/train", "scripts/check"} <= set(names)
    for name in names:
        text = (REPO / name).read_text()
        assert text.startswith("# shellcheck shell=") or "\nset -euo pipefail\n" in text, name


@pytest.fixture
def gates(machine):
    """A clone with stand-ins for the tools of the gates, in an environment of the user's own."""
    clone = machine.root / "clone"
    shutil.copytree(REPO / "scripts", clone / "scripts")
    hook = clone / ".git" / "hooks" / "pre-push.sample"
    hook.parent.mkdir(parents=True)
    hook.write_text("#!/bin/sh\n")
    (clone / "library.bin").write_bytes(b"\0\0binary")
    (machine.root / "own").mkdir()
    (machine.root / "own" / "bin").symlink_to(machine.bin)
    for tool in ("python", "ruff", "mypy", "lint-imports", "shellcheck", "hadolint"):
        machine.install(
            tool, f'[[ "${{FAKE_FAILS:-}}" != {tool} ]] || {{ echo "bad {tool}"; exit 3; }}'
        )
    machine.environ["ASYNCDDP_VENV"] = str(machine.root / "own")

    def check(*arguments, **environ):
        return machine.run(clone / "scripts" / "check", *arguments, **environ)

    return check


def test_check_runs_all_gates_in_order(machine, gates):
    """Without arguments every gate runs, each with one line and its time."""
    done = gates()
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == [
        "format", "lint", "types", "imports", "size", "startup", "shell", "docker", "doctests",
    ]  # fmt: skip
    assert all(line[1] == "ok" and line[3] == "s" for line in lines)
    calls = "\n".join(machine.calls())
    assert "[--strict]" in calls
    assert "[--doctest-modules]" in calls
    assert "[asyncddp] [--quiet]" in calls


@pytest.mark.parametrize(
    ("tool", "names"),
    [
        ("mypy", "types"),
        ("ruff", "format lint"),
        ("shellcheck", "shell"),
        ("hadolint", "docker"),
    ],
)
def test_a_failing_gate_is_shown_and_named_and_the_others_still_run(gates, tool, names):
    """A gate that fails shows its output; the rest run; the end names it; the code is 1."""
    done = gates(FAKE_FAILS=tool)
    assert done.returncode == 1
    assert f"    bad {tool}" in done.stdout
    assert "doctests  ok" in done.stdout
    assert done.stderr == f"check: failed: {names}\n"


def test_shell_scripts_are_found_without_git_too(machine, gates):
    """In a folder that git does not know, our scripts are checked and git's own are not."""
    done = gates("shell")
    assert done.returncode == 0
    assert "ignored null byte" not in done.stdout
    (call,) = [call for call in machine.calls() if call.startswith("shellcheck")]
    for name in ("scripts/train", "scripts/check", "scripts/lib/environment.sh"):
        assert f"[./{name}]" in call
    assert "hooks" not in call
    assert "library.bin" not in call


def test_named_gates_run_alone(gates):
    """`scripts/check lint` runs one gate."""
    done = gates("lint")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["lint"]


def test_fix_formats_first(machine, gates):
    """--fix lets ruff mend and format before the gates look."""
    assert gates("--fix", "format").returncode == 0
    ruff = [call for call in machine.calls() if call.startswith("ruff")]
    assert ruff[0].startswith("ruff [check] [--fix-only]")
    assert ruff[1] == "ruff [format] [.]"
    assert ruff[2].startswith("ruff [format] [--check]")


@pytest.fixture
def ci(machine):
    """A clone in which the scripts are stand-ins, to see what .ci/run makes of their ends."""
    clone = machine.root / "clone"
    (clone / "scripts").mkdir(parents=True)
    shutil.copytree(REPO / ".ci", clone / ".ci")
    summary = "============ 3 passed in 1.23s ============"
    for name, words in (("check", "gates"), ("test", summary)):
        script = clone / "scripts" / name
        script.write_text(
            f'#!{machine.bin}/bash\necho "{words}"\n[[ "${{FAKE_FAILS:-}}" != {name} ]]\n'
        )
        script.chmod(0o755)
    machine.install("python3", "")
    machine.install("slurmctld", "")

    def run(**environ):
        return machine.run(clone / ".ci" / "run", **environ)

    run.clone = clone
    return run


@pytest.mark.parametrize(("failing", "code"), [("", 0), ("FAKE_FAILS=bare", 1)])
def test_ci_makes_an_environment_without_any_settings(machine, ci, failing, code):
    """It has neither pip's settings nor the user's home, its folder is gone, and it can fail."""
    (ci.clone / ".venv" / "bin").mkdir(parents=True)
    (ci.clone / ".venv" / "bin" / "python").symlink_to(machine.install("python", ""))
    (ci.clone / "scripts" / "test").write_text(
        f"""#!{machine.bin}/bash
        [[ -n ${{ASYNCDDP_VENV:-}} ]] || {{ echo "= 3 passed in 1.23s ="; exit; }}
        echo "$*|$HOME|${{PIP_FIND_LINKS:-none}}|$ASYNCDDP_VENV" >'{machine.root}/bare'
        mkdir -p "$ASYNCDDP_VENV" && [[ -d $HOME && -z '{failing}' ]]
        """
    )
    done = ci(PIP_FIND_LINKS="/opt")
    assert done.returncode == code, done.stdout
    assert ("failed: a bare machine" in done.stdout) is bool(code)
    (asked,) = [call for call in machine.calls() if "[pip]" in call]
    assert asked.endswith("[pip]")
    words, home, settings, folder = (machine.root / "bare").read_text().strip().split("|")
    assert words == "tests/launch/test_launch_self_test.py --quiet"
    assert (REPO / words.split()[0]).is_file()
    assert settings == "none"
    assert home != str(machine.root)
    assert not Path(folder).parent.exists()


@pytest.mark.parametrize("failing", ["", "check", "test"])
def test_ci_runs_both_and_fails_with_either(machine, ci, failing):
    """Gates and suite both run; the code tells whether both passed; the summary comes last."""
    machine.install("chromium", "")
    machine.install("ip", "")
    done = ci(FAKE_FAILS=failing)
    assert (done.returncode == 0) is (not failing)
    assert done.stdout.startswith("gates\nPyPI cannot be reached from here; going on without")
    assert done.stdout.splitlines()[-1] == "============ 3 passed in 1.23s ============"
    assert (f"failed: scripts/{failing}" in done.stdout) is bool(failing)
    assert not [call for call in machine.calls() if call.startswith("apt-get")]


def test_ci_fails_where_the_suite_fails_once(machine, ci):
    """Nothing is run again: the suite is started once, though a second run would pass."""
    (ci.clone / "scripts" / "test").write_text(
        f"""#!{machine.bin}/bash
        echo "$*" >>'{machine.root}/started'
        [[ $1 != all || $(grep -c . '{machine.root}/started') -gt 2 ]]
        """
    )
    done = ci()
    assert done.returncode == 1, done.stdout
    assert "failed: scripts/test all" in done.stdout
    assert (machine.root / "started").read_text().splitlines() == ["release --quiet", "all"]


def test_ci_installs_only_what_is_missing(machine, ci):
    """What is missing is installed with apt; where apt fails, words say so and the rest runs."""
    machine.install("apt-get", "")
    assert ci().returncode == 0
    assert [call for call in machine.calls() if call.startswith("apt-get")] == [
        "apt-get [install] [-qq] [-y] [--no-install-recommends] [chromium]",
        "apt-get [install] [-qq] [-y] [--no-install-recommends] [iproute2]",
    ]
    machine.install("apt-get", '[[ "$*" != *chromium* ]]')
    done = ci()
    assert done.returncode == 0
    assert "apt could not install chromium" in done.stdout
    assert "could not install iproute2" not in done.stdout, "one does not hold up the other"
    (machine.bin / "apt-get").unlink()
    assert "there is no apt-get here; going on without iproute2" in ci().stdout
