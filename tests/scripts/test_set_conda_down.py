"""set_conda_down.sh against a stand-in conda that notes its calls and pretends to have some."""

from __future__ import annotations

from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "set_conda_down.sh"
SETTINGS = "OMPI_MCA_opal_cuda_support=true OMPI_MCA_pml=ucx UCX_MEMTYPE_CACHE=n"

CONDA = """
case "$1 $2" in
    "env list")
        printf '# conda environments:\\n#\\nbase  *  /opt/conda\\n'
        for name in ${FAKE_ENVS:-}; do printf '%s  /opt/conda/envs/%s\\n' "$name" "$name"; done ;;
    *) echo "conda does: $1 $2, __cuda ${CONDA_OVERRIDE_CUDA:-as it is}" ;;
esac
[[ -z ${FAKE_FAILS:-} || "$*" != *"$FAKE_FAILS"* ]]
"""
NVIDIA = '[[ "$1" == -L ]] && echo "GPU 0: stand-in"'


@pytest.fixture
def down(machine):
    """Run the script with the given arguments and environment; ``conda`` and a driver are there."""
    machine.install("conda", CONDA)
    machine.install("nvidia-smi", NVIDIA)

    def run(*arguments, **environ):
        machine.log.unlink(missing_ok=True)
        return machine.run(SCRIPT, *arguments, **environ)

    return run


def conda_calls(machine, name="conda"):
    """The calls of conda as words, without ``env list``, which changes nothing."""
    calls = [call.split(" [") for call in machine.calls() if call.startswith(f"{name} ")]
    words = [[word.rstrip("]") for word in call[1:]] for call in calls]
    return [call for call in words if call != ["env", "list"]]


def test_fresh_creates_stores_settings_installs_and_tests_itself(machine, down):
    """Without the environment: create, settings, this clone without its dependencies, doctor."""
    done = down()
    assert done.returncode == 0, done.stderr
    create, settings, install, doctor = conda_calls(machine)
    assert create[:6] == [
        "create", "--yes", "--name", "asyncddp", "--override-channels", "--channel",
    ]  # fmt: skip
    packages = create[7:]
    assert "openmpi>=5.0.7,!=5.0.8,<6" in packages
    assert {"python=3.12", "pytorch=2.*=cuda*", "cuda-version>=12", "ucx", "nccl", "cupy"} < set(
        packages
    )
    assert settings == ["env", "config", "vars", "set", "--name", "asyncddp", *SETTINGS.split()]
    assert install[:3] == ["run", "--name", "asyncddp"]
    assert install[-4:] == ["--no-deps", "--no-build-isolation", "--editable", str(REPO)]
    assert doctor == ["run", "--name", "asyncddp", "asyncddp", "doctor"]
    assert "conda does: run --name" in done.stdout, "the self-test's output is shown"
    assert done.stdout.endswith("Ready. Now: conda activate asyncddp\n")


def test_second_run_updates_in_place(machine, down):
    """With the environment there: the same packages by ``install``, and nothing is created."""
    down()
    created = conda_calls(machine)
    assert down(FAKE_ENVS="other asyncddp").returncode == 0
    updated = conda_calls(machine)
    assert updated[0] == ["install", *created[0][1:]]
    assert updated[1:] == created[1:]


def test_an_environment_whose_name_only_begins_alike_is_another(machine, down):
    """``asyncddp-old`` is not ``asyncddp``."""
    assert down(FAKE_ENVS="asyncddp-old").returncode == 0
    assert conda_calls(machine)[0][0] == "create"


def test_cpu_leaves_cuda_out(machine, down):
    """--cpu: no CUDA package and no setting; one that an earlier run stored is taken back."""
    assert down("--cpu", "--name", "little", "--python", "3.11").returncode == 0
    create, install, doctor = conda_calls(machine)
    assert {"python=3.11", "pytorch=2.*=cpu*"} < set(create)
    assert not [word for word in create if "cu" in word and "cpu" not in word]
    assert not {"nccl", "ucx"} & set(create)
    assert [call[:3] for call in (install, doctor)] == [["run", "--name", "little"]] * 2
    assert down("--cpu", FAKE_ENVS="asyncddp").returncode == 0
    names = [setting.split("=")[0] for setting in SETTINGS.split()]
    unset = ["env", "config", "vars", "unset", "--name", "asyncddp", *names]
    assert conda_calls(machine)[1] == unset


def test_without_a_driver_the_cuda_packages_come_all_the_same(machine, down, has_gpu):
    """On a login node conda is told which CUDA to expect, and the user is told that it was."""
    if has_gpu:
        pytest.skip("this machine has a GPU, so its driver cannot be missing")
    (machine.bin / "nvidia-smi").unlink()
    done = down()
    assert done.returncode == 0
    assert "No NVIDIA driver here: installing for CUDA 12.9 all the same" in done.stderr
    assert "conda does: create --yes, __cuda 12.9" in done.stdout
    assert "cuda-version=12.9" in conda_calls(machine)[0]
    assert down("--cuda", "13").returncode == 0
    assert "cuda-version=13" in conda_calls(machine)[0]


@pytest.mark.parametrize(
    ("failing", "step", "calls"),
    [
        ("create", "creating the environment asyncddp", 1),
        ("config vars", f"storing {SETTINGS}", 2),
        ("pip install", f"installing asyncddp from {REPO}", 3),
        ("doctor", "self-test: asyncddp doctor", 4),
    ],
)
def test_a_failing_step_ends_it_with_a_sentence(machine, down, failing, step, calls):
    """Whichever step fails: its name and code, exit code 1, and nothing after it."""
    done = down(FAKE_FAILS=failing)
    assert done.returncode == 1
    assert f"set_conda_down.sh: {step} failed (exit code 1)" in done.stderr
    assert "Ready" not in done.stdout
    assert len(conda_calls(machine)) == calls


def test_an_env_list_that_fails_is_no_reason_to_create(machine, down):
    """Where conda cannot even list, nothing is created over what may be there."""
    done = down(FAKE_FAILS="env list")
    assert done.returncode == 1
    assert "env list' failed" in done.stderr
    assert not conda_calls(machine)


def test_dry_run_runs_nothing_and_prints_what_can_be_pasted(machine, down):
    """--dry-run: conda is not called at all, not even to list; the lines are shell commands."""
    done = down("--dry-run", "--cuda", "12.9")
    assert done.returncode == 0
    assert not conda_calls(machine)
    assert not [call for call in machine.calls() if call.startswith("conda")]
    comment, *lines = done.stdout.splitlines()
    assert comment.startswith("#")
    machine.run("-c", "\n".join(lines))
    pasted = conda_calls(machine)
    assert down("--cuda", "12.9").returncode == 0
    assert conda_calls(machine) == pasted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "my env"], "make a name, got 'my env'"),
        (["--name", "a;rm"], "make a name, got 'a;rm'"),
        (["--name", "../up"], "make a name, got '../up'"),
        (["--name", ""], "make a name, got ''"),
        (["--name", "-n"], "make a name, got '-n'"),
        (["--name", "base"], "'base' is conda's own environment"),
        (["--name"], "--name needs a value"),
        (["--python", "3.9"], "--python: expected 3.10 or newer, such as 3.12, got '3.9'"),
        (["--cuda", "11.8"], "--cuda: expected 12 or newer, such as 12.9, got '11.8'"),
        (["--cuda", "12", "--cpu"], "--cuda and --cpu exclude each other"),
        (["--gpu"], "unknown argument '--gpu'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(machine, down, arguments, message):
    """Wrong arguments name themselves, and conda is never called."""
    done = down(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not machine.calls()


def test_conda_is_found_by_variable_and_by_name(machine, down):
    """CONDA_CMD wins, then CONDA_EXE, conda, mamba, micromamba."""
    tool = machine.install("my-conda", CONDA)
    for variable in ("CONDA_CMD", "CONDA_EXE"):
        assert down(**{variable: str(tool)}).returncode == 0
        assert conda_calls(machine, "my-conda")
        assert not conda_calls(machine)
    (machine.bin / "conda").rename(machine.bin / "unused")
    machine.install("micromamba", CONDA)
    done = down()
    assert done.returncode == 0
    assert done.stdout.endswith("Ready. Now: micromamba activate asyncddp\n")


def test_without_conda_one_sentence(machine, down):
    """No conda at all, or a CONDA_CMD that is none: one sentence that says what to do."""
    (machine.bin / "conda").unlink()
    done = down()
    assert done.returncode == 1
    assert done.stderr.startswith("set_conda_down.sh: no conda, mamba or micromamba found: install")
    done = down(CONDA_CMD="/nowhere/conda")
    assert done.returncode == 1
    assert "CONDA_CMD=/nowhere/conda is not a program" in done.stderr


def test_help_teaches(machine, down):
    """--help names every option and runs nothing."""
    done = down("--help")
    assert done.returncode == 0
    for option in ("--name", "--python", "--cuda", "--cpu", "--dry-run"):
        assert option in done.stdout
    assert not machine.calls()
